from collections.abc import Callable

INTERFACE: int

Buffer = bytes | memoryview

def code_at(data: bytes, at: int) -> int: ...
def pull_key(data: bytes, at: int, max_header_bytes: int) -> bytes | None: ...
def take_pulls(
    data: bytes,
    at: int,
    max_header_bytes: int,
    checked: dict[bytes, object],
    admit: Callable[[object, int, int], tuple[object, ...] | None],
    segment_at: Callable[[int], tuple[int, int, int]],
    read_at: Callable[[int, int, int], bytes],
    crc32: Callable[[bytes, int], int],
    sums: tuple[object, ...],
    shared: tuple[int, int, Buffer],
    limits: tuple[int, int, int, int],
) -> tuple[int, int, list[Buffer], int, list[tuple[object, int, int, int]], tuple[int, int, Buffer]] | None: ...
def take_sends(
    data: bytes,
    at: int,
    account: bytes,
    queues: dict[bytes, tuple[object, bytes]],
    log_end: int,
    now_ms: int,
    first_mark: bytes,
    mark_at: Callable[[int], bytes],
    born_host: bytes,
    broker_texts: tuple[bytes, bytes, bytes, bytes],
    limits: tuple[int, ...],
) -> tuple[int, int, int, bytes, list[tuple[object, bytes, int, int]], bytes] | None: ...
def decode_slice(
    data: bytes, begin: int, end: int, names: tuple[bytes, ...], skipped: tuple[bytes, ...] | None
) -> (
    tuple[
        int,
        Buffer,
        Buffer,
        Buffer,
        Buffer,
        tuple[Buffer, Buffer],
        list[tuple[int, Buffer, Buffer, Buffer]],
        tuple[int, Buffer, Buffer, Buffer, Buffer, Buffer, Buffer],
    ]
    | None
): ...
def records(
    flags: list[int],
    bodies: list[bytes],
    texts: list[bytes],
    crcs: list[int],
    topic: bytes,
    queue_id: int,
    middle: bytes,
    queue_offset: int,
    position: int,
) -> tuple[bytes, list[int], list[int]] | None: ...
def entries(flags: list[int], bodies: list[bytes], texts: list[str]) -> bytes | None: ...
