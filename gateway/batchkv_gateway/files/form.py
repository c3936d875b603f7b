"""The form of an upload, read while it arrives: the file goes to the disk, fields stay small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from batchkv_gateway.errors import invalid
from batchkv_gateway.files.folder import Incoming
from batchkv_gateway.files.records import INPUT

MAX_FIELD_BYTES = 256
MAX_PART_HEADERS, MAX_PART_HEADER_BYTES = 8, 4096
MIN_EXPIRY_SECONDS, MAX_EXPIRY_SECONDS = 3600, 2_592_000
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = frozenset({"purpose", _ANCHOR, _SECONDS})


@dataclass(frozen=True, slots=True)
class Upload:
    """The fields of an upload whose file was written. 0 seconds: the gateway's default."""

    filename: str
    expires_after_seconds: int


class UploadForm:
    """Reads an upload piece by piece. Raises ApiError for a form that is none, or has too much."""

    def __init__(self, content_type: str, begin: Callable[[], Incoming]) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            raise invalid("an upload is a multipart/form-data body with a boundary", "file")
        self._begin = begin
        self.incoming: Incoming | None = None
        self._fields: dict[str, bytearray] = {}
        self._filename = ""
        self._header = (bytearray(), bytearray())
        self._disposition = b""
        self._into: bytearray | Incoming | None = None
        self._is_over = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._part,
                    "on_header_field": lambda data, start, end: self._header[0].extend(
                        data[start:end]
                    ),
                    "on_header_value": lambda data, start, end: self._header[1].extend(
                        data[start:end]
                    ),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._begin_part,
                    "on_part_data": self._data,
                    "on_end": self._end,
                },
                max_header_count=MAX_PART_HEADERS,
                max_header_size=MAX_PART_HEADER_BYTES,
            )
        except FormParserError as fault:
            raise _bad_form(fault) from fault

    def write(self, data: bytes) -> None:
        """Read the next bytes of the body."""
        try:
            self._parser.write(data)
        except FormParserError as fault:
            raise _bad_form(fault) from fault

    def finish(self) -> tuple[Incoming, Upload]:
        """The file and the fields, when the body is over."""
        if not self._is_over:
            raise invalid("the form ends before its last boundary: send it again", "file")
        if self.incoming is None:
            raise invalid("the form has no part named file", "file", "missing_required_parameter")
        fields = {
            name: bytes(value).decode("utf-8", "replace") for name, value in self._fields.items()
        }
        if fields.get("purpose") != INPUT:
            got = f", got {fields['purpose'][:80]!r}" if "purpose" in fields else ""
            raise invalid(f"purpose must be {INPUT}{got}", "purpose")
        return self.incoming, Upload(self._filename, _expiry(fields))

    def close(self) -> None:
        """Delete the file unless it was kept."""
        if self.incoming is not None:
            self.incoming.__exit__(None, None, None)

    def _part(self) -> None:
        self._disposition, self._into = b"", None

    def _end_header(self) -> None:
        name, value = map(bytes, self._header)
        if name.lower() == b"content-disposition":
            self._disposition = value
        self._header[0].clear()
        self._header[1].clear()

    def _begin_part(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name == "file":
            if self.incoming is not None:
                raise invalid("the form has two parts named file", "file")
            self._filename = options.get(b"filename", b"upload").decode("utf-8", "replace")
            self.incoming = self._into = self._begin()
        elif name in _FIELDS and name not in self._fields:
            self._into = self._fields[name] = bytearray()
        else:
            raise invalid(
                f"the form has a part {name[:80]!r} that is unknown or repeated", name[:80]
            )

    def _data(self, data: bytes, start: int, end: int) -> None:
        if isinstance(self._into, bytearray):
            if len(self._into) + end - start > MAX_FIELD_BYTES:
                raise invalid(f"a field of the form has more than {MAX_FIELD_BYTES} bytes")
            self._into += data[start:end]
        elif self._into is not None:
            self._into.write(memoryview(data)[start:end])

    def _end(self) -> None:
        self._is_over = True


def _expiry(fields: dict[str, str]) -> int:
    """The seconds after which the file expires; 0 if the form does not say."""
    anchor, seconds = fields.get(_ANCHOR), fields.get(_SECONDS)
    if anchor is None and seconds is None:
        return 0
    return checked_expiry(anchor, int(seconds) if seconds and seconds.isdecimal() else seconds)


def checked_expiry(anchor: object, seconds: object, field: str = "expires_after") -> int:
    """The seconds of an ``expires_after``. Raises ApiError for one that is wrong."""
    if anchor != "created_at":
        raise invalid(f"{field}.anchor must be created_at", f"{field}.anchor")
    is_whole = isinstance(seconds, int) and not isinstance(seconds, bool)
    if not is_whole or not MIN_EXPIRY_SECONDS <= int(str(seconds)) <= MAX_EXPIRY_SECONDS:
        raise invalid(
            f"{field}.seconds must be {MIN_EXPIRY_SECONDS} to {MAX_EXPIRY_SECONDS}",
            f"{field}.seconds",
        )
    return int(str(seconds))


def _bad_form(fault: Exception) -> Exception:
    return invalid(f"the form cannot be read: {str(fault)[:200]}", "file", "invalid_form")
