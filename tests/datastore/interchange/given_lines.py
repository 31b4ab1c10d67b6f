"""Lines of a stream that a test gives in chunks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from replaylake.datastore.interchange.ingest.stream.lines import Line


class GivenLines:
    """Lines that come in these chunks, one a take."""

    name = "given"

    def __init__(self, chunks: Sequence[Sequence[Any]]) -> None:
        self._chunks = list(chunks)
        self._number = 0

    @property
    def is_over(self) -> bool:
        return not self._chunks

    def take(self, timeout_s: float) -> list[Line]:
        lines = []
        for one in self._chunks.pop(0):
            self._number += 1
            text = one if isinstance(one, bytes) else json.dumps(one).encode()
            lines.append(Line(self._number, text))
        return lines
