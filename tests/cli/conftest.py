"""Runs commands in this process, as `replaylake ...` would, and keeps what they print apart."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from replaylake.cli.main import main
from replaylake.cli.output import progress
from replaylake.datastore.interchange.formats.rlds.tfrecord import records
from replaylake.datastore.interchange.sources.source import find_source


@dataclass(frozen=True)
class Ran:
    """An exit code and the two streams."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What stdout holds, which has to be one JSON object and nothing else."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value

    def failed(self, *said: str) -> None:
        """Check that it was one clear line and exit code 1; an error in SQL also shows where."""
        assert self.code == 1, self
        line, *excerpt = self.err.splitlines()
        if excerpt:
            assert excerpt[0].startswith("LINE ")
            assert excerpt[1].strip(" ^") == ""
            assert len(excerpt) == 2
        assert line.startswith("error: ")
        assert "fault in ReplayLake" not in line
        for text in said:
            assert text in line, (text, line)


Run = Callable[..., Ran]


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture
def run(
    lake: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Run:
    monkeypatch.setenv("REPLAYLAKE_LAKE", str(lake))
    # Every two seconds a command says how far it is: a slow machine would read more of it.
    monkeypatch.setattr(progress, "_LINE_INTERVAL_S", 3600.0)

    def call(*arguments: object) -> Ran:
        capfdbinary.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capfdbinary.readouterr()
        return Ran(code, captured.out.decode(errors="surrogateescape"), captured.err.decode())

    return call


@pytest.fixture
def tree(lake: Path) -> Callable[[], dict[str, bytes]]:
    """Returns every file of the lake, to show that a command changed nothing."""
    return lambda: {
        str(path.relative_to(lake)): path.read_bytes()
        for path in sorted(lake.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="session")
def cartpole() -> Path:
    """The RLlib log that ships with the project."""
    return Path(__file__).parents[2] / "examples" / "data" / "rllib_cartpole"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Two hand-made episodes: returns 3 and 10, the first terminated, the second truncated."""
    rows = [
        "episode_id,step,x,y,action,reward,terminated,truncated",
        "a,0,0.5,1.0,0,1.0,false,false",
        "a,1,1.5,2.0,1,2.0,true,false",
        "b,0,2.5,3.0,1,10.0,false,true",
    ]
    path = tmp_path / "log.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


_FIELD = descriptor_pb2.FieldDescriptorProto
# tensorflow/core/util/event.proto and framework/summary.proto, as far as scalars need them.
_MESSAGES: dict[str, list[tuple[str, int, int, str]]] = {
    "Value": [("tag", 1, _FIELD.TYPE_STRING, ""), ("simple_value", 2, _FIELD.TYPE_FLOAT, "")],
    "Summary": [("value", 1, _FIELD.TYPE_MESSAGE, "Value")],
    "SessionLog": [("status", 1, _FIELD.TYPE_INT32, "")],
    "Event": [
        ("wall_time", 1, _FIELD.TYPE_DOUBLE, ""),
        ("step", 2, _FIELD.TYPE_INT64, ""),
        ("file_version", 3, _FIELD.TYPE_STRING, ""),
        ("summary", 5, _FIELD.TYPE_MESSAGE, "Summary"),
        ("session_log", 7, _FIELD.TYPE_MESSAGE, "SessionLog"),
    ],
}


def _event_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="event.proto", package="t", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, of in fields:
            repeated = (name, field) == ("Summary", "value")
            label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            message.field.add(
                name=field,
                number=number,
                type=kind,
                label=label,
                type_name=f".t.{of}" if of else None,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Event"))


class EventsOf:
    """Reads event files; every checksum is compared by another implementation than the writer's."""

    def __init__(self) -> None:
        self._event = _event_class()

    def read(self, path: Path) -> list[Any]:
        (source,) = find_source([path]).files
        return [self._event.FromString(record) for record in records(source)]

    def scalars(self, events: list[Any]) -> list[tuple[int, dict[str, float]]]:
        return [
            (event.step, {value.tag: value.simple_value for value in event.summary.value})
            for event in events
            if event.HasField("summary")
        ]


@pytest.fixture(scope="session")
def events_of() -> EventsOf:
    return EventsOf()
