"""Why a row failed, as one word for programs."""

from __future__ import annotations


class ErrorCode:
    """The codes that a failed row can carry."""

    INVALID_JSON = "invalid_json"
    INVALID_REQUEST = "invalid_request"
    DUPLICATE_CUSTOM_ID = "duplicate_custom_id"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    TIMEOUT = "timeout"
    CANCELED = "canceled"
    EXPIRED = "expired"
    LOST = "lost"
    OUT_OF_MEMORY = "out_of_memory"
    ENGINE_ERROR = "engine_error"


# Of rows that are wrong, as the reader of the input or a worker says.
INPUT_FAULTS = frozenset(
    {
        ErrorCode.INVALID_JSON,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.DUPLICATE_CUSTOM_ID,
        ErrorCode.UNSUPPORTED_PARAMETER,
    }
)
# Of requests that a server would refuse with a response: with the same model and the same worker,
# another try of the same line fails again.
REFUSED_CODES = INPUT_FAULTS | {ErrorCode.CONTEXT_LENGTH_EXCEEDED}
