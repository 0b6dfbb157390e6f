"""One part in a separate process: `python -m research.hardware.part OUT PART SECONDS SMALL [DRAFTER]`."""

import sys
from pathlib import Path

from research.hardware.record import Record


def main() -> None:
    """Run it; figures are on disk when they are made."""
    out, part, seconds, small, *more = sys.argv[1:]
    record = Record(Path(out), part, float(seconds), small == "True")
    if part == "facts":
        from research.hardware import facts

        facts.run(record)
    elif part == "exact":
        from research.hardware import exact

        exact.run(record, *more)
    elif part == "stages":
        from research.hardware import training

        training.stages(record)
    elif part == "steps":
        from research.hardware import steps

        steps.run(record)
    else:
        from research.hardware import training

        training.large(record)


if __name__ == "__main__":
    main()
