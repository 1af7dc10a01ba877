"""TorchTitan's metrics, and beside them raw records: what every table of `compare` is computed from."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.metrics import BaseLogger, LoggerContainer, MetricsProcessor

FOLDER = "records"


class RecordLogger(BaseLogger):
    """Appends one JSON object a logged step to `file`: `step` and all of TorchTitan's metrics of that rank.

    Each line is flushed, so a reader can follow a run. A resumed run appends: the last line of a step counts.
    """

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._lines = file.open("a")

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self._lines.write(json.dumps({"step": step, **metrics}) + os.linesep)
        self._lines.flush()

    def close(self) -> None:
        self._lines.close()


class RecordedMetrics(MetricsProcessor):
    """A MetricsProcessor whose every rank also writes `<dump_folder>/records/rank_N.jsonl`."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config: Config, *, dump_folder: str = "./outputs", **kwargs: Any) -> None:
        super().__init__(config, dump_folder=dump_folder, **kwargs)
        record = RecordLogger(Path(dump_folder) / FOLDER / f"rank_{torch.distributed.get_rank()}.jsonl")
        self.logger: BaseLogger = _both(self.logger, record)


def _both(*loggers: BaseLogger) -> LoggerContainer:
    container = LoggerContainer()
    for logger in loggers:
        container.add_logger(logger)
    return container
