"""Log lines on stderr: as text for people, or as one JSON object each for programs."""

import json
import logging
import sys
import time

FORMATS = ("text", "json")


class JsonFormatter(logging.Formatter):
    """One object per line: `time` (UTC), `level`, `logger`, `message`; `request_id`, `exception` where there are."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = getattr(record, "request_id", None)
        if request_id is not None:
            entry["request_id"] = request_id
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """`time level message`, and the request's id where there is one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", None)
        return super().formatMessage(record) + (f" [{request_id}]" if request_id else "")


def configure(log_format: str) -> None:
    """Sends the log of this process to stderr: everything of Headrace from INFO on, of libraries from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], force=True)
    logging.getLogger("headrace").setLevel(logging.INFO)
