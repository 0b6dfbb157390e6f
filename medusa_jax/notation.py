"""Lists and sizes as users write and read them."""


def byte_size(n: float) -> str:
    """Bytes to read: 1_250_000_000 -> "1.2 GB", 34_500_000 -> "34.5 MB", 120 -> "0.1 kB"."""
    power = 3 if n >= 1e9 else 2 if n >= 1e6 else 1
    return f"{n / 1000**power:,.1f} {' kMG'[power]}B"


def entries(text: str) -> list[str]:
    """The entries of a list such as "a, b,": empty ones do not count."""
    return [part.strip() for part in text.split(",") if part.strip()]
