"""How a worker tells the benchmark what happened and when: one JSON line per event, appended whole."""

import json
import os
import time
from pathlib import Path
from typing import Any


class Events:
    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def emit(self, kind: str, **fields: Any) -> None:
        """Stamp first, then write."""
        line = {"t": time.monotonic(), "kind": kind, "pid": os.getpid(), **fields}
        os.write(self.file, json.dumps(line).encode() + b"\n")
