"""Settings as flags and as a YAML file, both made from the dataclasses that define them: there is no second list."""

import argparse
import re
import types
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

from headrace.config import EngineConfig, reject_unknown
from headrace.errors import ConfigError
from headrace.server.config import ServerConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

TYPE_NAMES = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "a mapping",
}


def add_flags(
    parser: argparse.ArgumentParser,
    title: str,
    settings: "type[DataclassInstance]",
    names: list[str] | None = None,
    defaults: Mapping[str, str] | None = None,
) -> None:
    """A group of flags, one for each field of a dataclass or each in `names`: `max_num_seqs` is `--max-num-seqs`.

    A flag that was not given leaves nothing in the parsed namespace, so that `given` can tell it from one that was
    given its default. The help is the field's line in the class's docstring, and its default, or what `defaults` says.
    """
    group = parser.add_argument_group(title)
    docs = field_docs(settings)
    for field in fields(settings):
        if names is not None and field.name not in names:
            continue
        kinds, is_list = scalar_types(field)
        kind = str if str in kinds else kinds[0]
        help = docs[field.name].replace("%", "%%").replace("`", "").removesuffix(".")
        default = (defaults or {}).get(field.name, field.default)
        if default not in (None, MISSING):
            help += f" (default: {str(default).lower() if kind is bool else default})"
        flag = "--" + field.name.replace("_", "-")
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help)
        else:
            action = "append" if is_list else "store"
            metavar = "VALUE" if len(kinds) > 1 else {int: "N", float: "X", str: "TEXT"}[kind]
            group.add_argument(flag, type=kind, action=action, metavar=metavar, default=argparse.SUPPRESS, help=help)


def given(args: argparse.Namespace, settings: "type[DataclassInstance]") -> dict[str, Any]:
    """The flags of a dataclass's fields that are on the command line."""
    return {field.name: getattr(args, field.name) for field in fields(settings) if hasattr(args, field.name)}


def add_engine_flags(parser: argparse.ArgumentParser, *, seed: bool = True) -> None:
    """The flags of EngineConfig, and `--config`. The model has no flag, and without `seed` the seed has none."""
    left_out = ("model",) if seed else ("model", "seed")
    add_flags(parser, "engine settings", EngineConfig, [f.name for f in fields(EngineConfig) if f.name not in left_out])
    parser.add_argument_group("settings from a file").add_argument(
        "--config",
        metavar="FILE",
        help="a YAML file with any of these settings, as 'max_model_len: 4096' at the top or under 'engine_config:' "
        "and 'server_config:'; flags win over it",
    )


def field_docs(settings: "type[DataclassInstance]") -> dict[str, str]:
    """What the docstring says of each field, from its lines `name: text` and `name, name: text`, however long."""
    docs: dict[str, str] = {}
    for entry in re.finditer(r"^    (\w+(?:, \w+)*): (.+(?:\n {8}.+)*)", settings.__doc__ or "", re.MULTILINE):
        for name in entry[1].split(", "):
            docs[name] = " ".join(entry[2].split())
    return docs


def scalar_types(field: "Field[Any]") -> tuple[tuple[type, ...], bool]:
    """The types of a field but for None, and whether it may be a list of them: `list[str] | None` is ((str,), True)."""
    members = get_args(field.type) if isinstance(field.type, types.UnionType) else (field.type,)
    for member in members:
        if get_origin(member) is list:
            return get_args(member), True
    members = tuple(get_origin(member) or member for member in members)  # a dict is a dict, whatever is in it
    return tuple(m for m in members if isinstance(m, type) and m is not type(None)), False


def load_config_file(path: str | Path) -> dict[str, Any]:
    """The settings in a YAML file, by field name.

    Keys stand at the top or under `engine_config` and `server_config`, with underscores or dashes. Raises ConfigError,
    naming the file, for one that cannot be read or parsed, and for a key that is unknown, given twice, or of the wrong
    type.
    """
    document = read_yaml(Path(path))
    engine = {field.name: field for field in fields(EngineConfig)}
    server = {field.name: field for field in fields(ServerConfig)}
    sections = {"engine_config": engine, "server_config": server}
    settings: dict[str, Any] = {}

    def take(mapping: Mapping[Any, Any], known: dict[str, "Field[Any]"], where: str) -> None:
        for key, value in mapping.items():
            name = str(key).replace("-", "_")
            reject_unknown([name], known, where)
            if name in settings:
                raise ConfigError(f"{name} is given twice")
            settings[name] = checked(known[name], value)

    try:
        for section, known in sections.items():
            nested = document.pop(section, None)
            if nested is not None and not isinstance(nested, dict):
                raise ConfigError(f"{section} must hold settings as 'name: value' lines, not {nested!r}")
            take(nested or {}, known, f"setting in {section}")
        take(document, engine | server, "setting")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return settings


def read_yaml(path: Path) -> dict[Any, Any]:
    """The mapping in a YAML file; an empty file is an empty one. Raises ConfigError where there is no such thing."""
    import yaml

    class UniqueKeyLoader(yaml.SafeLoader):
        """YAML's safe loader takes the last of several equal keys; here they are an error."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            for key, times in keys.items():
                if times > 1:
                    raise ConfigError(f"{path}: {key} is given twice")
            return super().construct_mapping(node, deep)

    try:
        document = yaml.load(path.read_text(encoding="utf-8"), UniqueKeyLoader)
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"config file {path} cannot be read: {reason}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict | None):
        raise ConfigError(f"{path} must hold settings as 'name: value' lines, not {TYPE_NAMES.get(type(document))}")
    return document or {}


def checked(field: "Field[Any]", value: Any) -> Any:
    """`value` if it is of the field's type. (Its range is checked where the dataclass is made.)"""
    kinds, is_list = scalar_types(field)
    if is_list and not isinstance(value, list):
        value = [value]
    allowed = (*kinds, int) if float in kinds else kinds
    for item in value if is_list else [value]:
        is_null = item is None and not is_list and type(None) in get_args(field.type)
        is_typed = isinstance(item, allowed) and (bool in kinds or not isinstance(item, bool))
        if not is_null and not is_typed:
            expected = " or ".join(TYPE_NAMES[kind] for kind in kinds)
            raise ConfigError(f"{field.name} must be {expected}, not {item!r}")
    return value


def engine_and_server_config(args: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """The configs of a command: its flags, and for what they do not say the `--config` file, if there is one.

    Raises ConfigError; the message names the file where a value from the file is at fault.
    """
    from_file = load_config_file(args.config) if args.config else {}
    from_flags = given(args, EngineConfig) | given(args, ServerConfig)

    def configs(settings: dict[str, Any]) -> tuple[EngineConfig, ServerConfig]:
        engine = {field.name: settings[field.name] for field in fields(EngineConfig) if field.name in settings}
        server = {field.name: settings[field.name] for field in fields(ServerConfig) if field.name in settings}
        return EngineConfig(**({"model": "default"} | engine)), ServerConfig(**server)

    try:
        return configs(from_file | from_flags)
    except ConfigError as error:
        try:
            configs(from_flags)
        except ConfigError:
            raise error from None  # the flags are wrong whatever the file says
        raise ConfigError(f"{args.config}: {error}") from None
