"""A number with its noun, as every text of ours says it."""


def counted(count: int, one: str, many: str = "") -> str:
    """`1 message waits` or `2,500 messages wait`. `many` is needed where more than an s follows the last word of `one`."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"
