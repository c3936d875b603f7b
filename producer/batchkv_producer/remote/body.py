"""The body of a submit: the bytes of all input files, one after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from batchkv_producer.errors import InputFileError
from batchkv_producer.intake.source import FileState, Inputs, state_of
from batchkv_producer.remote.terms import FilePart

PIECE_BYTES = 2**18


@dataclass(frozen=True, slots=True)
class InputBody:
    """The files of an input. Their sizes were read before."""

    inputs: Inputs
    parts: tuple[FilePart, ...]
    states: tuple[FileState, ...]

    @classmethod
    def of(cls, inputs: Inputs) -> InputBody:
        """The body of an input. Raises InputFileError."""
        parts, states = list[FilePart](), list[FileState]()
        for piece, label in zip(inputs.pieces, inputs.labels, strict=True):
            with piece.opened() as stream:
                begin = stream.tell()
                num_bytes = stream.seek(0, os.SEEK_END) - begin
                states.append(state_of(stream))
            parts.append(FilePart(label, num_bytes, piece.suffix))
        return cls(inputs, tuple(parts), tuple(states))

    @property
    def num_bytes(self) -> int:
        """The size of the body."""
        return sum(part.num_bytes for part in self.parts)

    def pieces(self) -> Iterator[bytes]:
        """The bytes. Raises InputFileError if a file has changed since ``of``, before its last
        ones: so the gateway never has a whole body of it."""
        parts = zip(self.inputs.pieces, self.parts, self.states, strict=True)
        for piece, part, state in parts:
            left, last = part.num_bytes, b""
            with piece.opened(state) as stream:
                while left:
                    data = stream.read(min(PIECE_BYTES, left))
                    if not data:
                        raise InputFileError(f"{part.name} became shorter while it was sent")
                    left -= len(data)
                    if last:
                        yield last
                    last = data
            if last:
                yield last
