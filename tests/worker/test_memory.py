"""How much memory a process may take, on made-up trees of control groups."""

import os
from pathlib import Path

import psutil
import pytest

from headrace.worker.memory import Available, available_cpus, available_memory

GiB, UNLIMITED = 2**30, 9223372036854771712  # what version 1 says where there is no limit


class Machine:
    """/proc and the mounts of a machine, as files."""

    def __init__(self, root: Path) -> None:
        self.root, self.proc = root, root / "proc"
        (self.proc / "self").mkdir(parents=True)
        self.members: list[str] = []
        self.mounts = ["21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw"]

    def mount(self, kind: str, point: str, *, shown: str = "/", options: str = "rw") -> None:
        self.mounts.append(
            f"{len(self.mounts) + 30} 21 0:30 {shown} {point} rw,nosuid shared:9 - {kind} {kind} {options}"
        )

    def group(self, directory: str, **files: int | str) -> None:
        path = self.root / directory.lstrip("/")
        path.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (path / name.replace("__", ".")).write_text(f"{content}\n")

    def available(self) -> Available:
        (self.proc / "self/cgroup").write_text("".join(f"{line}\n" for line in self.members))
        (self.proc / "self/mountinfo").write_text("".join(f"{line}\n" for line in self.mounts))
        return available_memory(self.proc, self.root)

    def cpus(self) -> int:
        self.available()  # writes the files
        return available_cpus(self.proc, self.root)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    free = psutil.virtual_memory()._replace(available=64 * GiB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    return Machine(tmp_path)


V2 = "/sys/fs/cgroup"


def test_without_groups_it_is_what_the_machine_has_free(machine: Machine) -> None:
    assert machine.available() == Available(64 * GiB, "the machine's free memory")


def test_not_linux(machine: Machine, tmp_path: Path) -> None:
    assert available_memory(tmp_path / "nothing", tmp_path).num_bytes == 64 * GiB


def test_this_machine() -> None:
    assert 0 < available_memory().num_bytes <= psutil.virtual_memory().total


class TestVersion2:
    @pytest.fixture(autouse=True)
    def _service(self, machine: Machine) -> None:
        machine.members = ["0::/system.slice/headrace.service"]
        machine.mount("cgroup2", V2)
        machine.group(V2, memory__stat="inactive_file 1")  # the root has no limit and no use
        machine.group(f"{V2}/system.slice", memory__max="max", memory__high="max", memory__current=50 * GiB)

    def test_the_processs_own_group(self, machine: Machine) -> None:
        machine.group(f"{V2}/system.slice/headrace.service", memory__max=8 * GiB, memory__current=3 * GiB)
        left = machine.available()
        assert left.num_bytes == 5 * GiB
        assert "headrace.service" in left.limited_by

    def test_a_parents_limit(self, machine: Machine) -> None:
        machine.group(f"{V2}/system.slice/headrace.service", memory__max="max", memory__current=3 * GiB)
        machine.group(f"{V2}/system.slice", memory__max=52 * GiB)
        left = machine.available()
        assert left.num_bytes == 2 * GiB  # others of the slice have used the rest
        assert left.limited_by.endswith("system.slice")

    def test_the_tightest_of_all_counts(self, machine: Machine) -> None:
        machine.group(f"{V2}/system.slice/headrace.service", memory__max=8 * GiB, memory__current=3 * GiB)
        machine.group(f"{V2}/system.slice", memory__max=60 * GiB)
        assert machine.available().num_bytes == 5 * GiB

    def test_a_group_of_somebody_else_does_not(self, machine: Machine) -> None:
        machine.group(f"{V2}/other.slice", memory__max=GiB, memory__current=GiB)
        assert machine.available().num_bytes == 64 * GiB

    def test_the_machine_may_have_less(self, machine: Machine) -> None:
        machine.group(f"{V2}/system.slice/headrace.service", memory__max=900 * GiB, memory__current=3 * GiB)
        assert machine.available() == Available(64 * GiB, "the machine's free memory")

    def test_high_is_a_limit_too(self, machine: Machine) -> None:
        machine.group(
            f"{V2}/system.slice/headrace.service", memory__max="max", memory__high=4 * GiB, memory__current=3 * GiB
        )
        assert machine.available().num_bytes == GiB

    def test_idle_files_in_the_cache_are_free(self, machine: Machine) -> None:
        stat = f"anon 5\nfile 99\ninactive_anon 7\ninactive_file {2 * GiB}\nactive_file 123"
        machine.group(
            f"{V2}/system.slice/headrace.service", memory__max=8 * GiB, memory__current=7 * GiB, memory__stat=stat
        )
        assert machine.available().num_bytes == 3 * GiB

    def test_over_the_limit(self, machine: Machine) -> None:
        machine.group(f"{V2}/system.slice/headrace.service", memory__max=GiB, memory__current=GiB + 1)
        assert machine.available().num_bytes == 0


def test_a_container_sees_its_own_group_as_the_top(machine: Machine) -> None:
    machine.members = ["0::/"]
    machine.mount("cgroup2", V2)
    machine.group(V2, memory__max=4 * GiB, memory__current=GiB)
    assert machine.available().num_bytes == 3 * GiB


@pytest.mark.parametrize("path", ["/docker/abc", "/docker/abc/job", "/docker/ab", "/../other", "/"])
def test_a_mount_that_shows_a_part_of_the_tree(machine: Machine, path: str) -> None:
    machine.members = [f"0::{path}"]
    machine.mount("cgroup2", V2, shown="/docker/abc")
    machine.group(V2, memory__max=4 * GiB, memory__current=GiB)
    machine.group(f"{V2}/job", memory__max=2 * GiB, memory__current=GiB)
    machine.group(f"{V2}/docker/abc", memory__max=1, memory__current=1)  # the part's own, of the same name
    assert machine.available().num_bytes == (GiB if path.endswith("job") else 3 * GiB)


class TestVersion1:
    @pytest.fixture(autouse=True)
    def _job(self, machine: Machine) -> None:
        machine.members = ["9:name=systemd:/", "5:cpu,cpuacct:/small", "4:memory,hugetlb:/pool/job", "0::/"]
        machine.mount("tmpfs", V2)
        machine.mount("cgroup", f"{V2}/cpu", options="rw,cpu,cpuacct")
        machine.mount("cgroup", f"{V2}/memory", options="rw,memory,hugetlb")
        machine.mount("cgroup2", f"{V2}/unified")
        machine.group(f"{V2}/memory", memory__limit_in_bytes=UNLIMITED, memory__usage_in_bytes=40 * GiB)
        machine.group(f"{V2}/memory/pool", memory__limit_in_bytes=UNLIMITED, memory__usage_in_bytes=9 * GiB)
        machine.group(f"{V2}/cpu/small", memory__limit_in_bytes=1, memory__usage_in_bytes=1)
        machine.group(f"{V2}/unified")

    def test_no_limit(self, machine: Machine) -> None:
        machine.group(f"{V2}/memory/pool/job", memory__limit_in_bytes=UNLIMITED, memory__usage_in_bytes=GiB)
        assert machine.available().num_bytes == 64 * GiB

    def test_own_limit(self, machine: Machine) -> None:
        stat = f"inactive_file 3\ntotal_inactive_file {GiB}"
        machine.group(
            f"{V2}/memory/pool/job",
            memory__limit_in_bytes=8 * GiB,
            memory__usage_in_bytes=3 * GiB,
            memory__stat=stat,
        )
        assert machine.available().num_bytes == 6 * GiB

    def test_a_parents_limit(self, machine: Machine) -> None:
        machine.group(f"{V2}/memory/pool/job", memory__limit_in_bytes=8 * GiB, memory__usage_in_bytes=GiB)
        machine.group(f"{V2}/memory/pool", memory__limit_in_bytes=10 * GiB)
        assert machine.available().num_bytes == GiB

    def test_a_mount_point_with_a_blank(self, machine: Machine) -> None:
        machine.mounts = [line.replace(f"{V2}/memory", "/my\\040groups") for line in machine.mounts]
        machine.group("/my groups/pool/job", memory__limit_in_bytes=8 * GiB, memory__usage_in_bytes=GiB)
        assert machine.available().num_bytes == 7 * GiB


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [("max 100000", 8), ("100000 100000", 1), ("150000 100000", 1), ("400000 100000", 4), ("20000 100000", 1), ("", 8)],
)
def test_threads_by_the_quota(machine: Machine, monkeypatch: pytest.MonkeyPatch, quota: str, cpus: int) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    machine.mount("cgroup2", V2)
    machine.members = ["0::/a/b"]
    machine.group(f"{V2}/a", cpu__max=quota)
    machine.group(f"{V2}/a/b", cpu__max="max 100000")
    assert machine.cpus() == cpus


def test_threads_by_the_quota_of_version_1(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    machine.mount("cgroup", "/sys/fs/cgroup/cpu", options="rw,cpu,cpuacct")
    machine.members = ["4:cpu,cpuacct:/a", "5:memory:/b"]
    machine.group("/sys/fs/cgroup/cpu/a", cpu__cfs_quota_us=250000, cpu__cfs_period_us=100000)
    assert machine.cpus() == 2
    machine.group("/sys/fs/cgroup/cpu/a", cpu__cfs_quota_us=-1)
    assert machine.cpus() == 8


def test_threads_without_groups(machine: Machine) -> None:
    assert machine.cpus() == len(os.sched_getaffinity(0))
