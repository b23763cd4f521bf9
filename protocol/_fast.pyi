INTERFACE: int

Buffer = bytes | memoryview

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
