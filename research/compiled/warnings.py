"""Known inefficiencies in compiled decode steps on TPUs and GPUs, by name."""

from collections.abc import Sequence

from medusa_jax.hlo.program import Instruction
from research.compiled.costs import Cost, stage_of
from research.compiled.readers import PASSING, Program, largest

SORT = "sort over the vocabulary"
COPY = "cache-sized copy"
ONE_ROW = "one-row product off the matrix unit"
FLOAT32 = "float32 product"
SCATTER = "scatter into a cache"
HOST = "host transfer"
LOOP = "loop with a data-dependent condition"
ROUNDS = "many small kernels of a loop"
NAMES = (SORT, COPY, ONE_ROW, FLOAT32, SCATTER, HOST, LOOP, ROUNDS)

GPUS = ("cuda", "rocm")
# Platforms on which one of them costs more than it need, where these are not all. A launch takes a GPU
# about 2 microseconds; CPUs have no matrix unit, and compute 16-bit products in float32.
ONLY_ON = {ONE_ROW: ("tpu", *GPUS), FLOAT32: ("tpu", *GPUS), ROUNDS: GPUS}
# Least kernels that a loop launches in a step: about .2 ms of a step.
MANY = 100
# Smaller operands are no weights.
LARGE = 2**18
_HOST = ("send", "recv", "infeed", "outfeed")


def warnings_of(
    program: Program,
    costs: Sequence[Cost],
    vocab_size: int,
    cache_numbers: int,
    platform: str = "tpu",
    large: int = LARGE,
) -> list[str]:
    """One line for each kind of defect in the step: its name, how often (kernels, of a loop), and where.

    Args:
      cache_numbers: elements of the keys of one layer on one device.
      platform: as `devices.platforms.platform` names it.
      large: least elements of a kernel.
    """
    places: dict[str, list[str]] = {}
    for cost in costs:
        x = cost.instruction
        names = _defects(program, x, vocab_size, cache_numbers, large)
        if cost.launched >= MANY:
            names += [ROUNDS] * cost.launched
        for name in names:
            if platform in ONLY_ON.get(name, (platform,)):
                places.setdefault(name, []).append(cost.label or x.name)
    return [
        f"{name}: {len(places[name])} x, {_where(places[name])}"
        for name in NAMES
        if name in places
    ]


def step_warnings(program: Program, dtype: str, platform: str) -> list[str]:
    """Defects of a training step: host transfers, and in 16 bits products of float32 operands.

    Loops over chunks of the loss end where the counted tokens do.
    """
    costs = [Cost(x, x.label, 0, 1) for x in program.instructions.values()]
    lines = warnings_of(program, costs, 0, 2**62, platform)
    prefixes = (HOST, *(() if dtype == "float32" else (FLOAT32,)))
    return [line for line in lines if line.startswith(prefixes)]


def _where(labels: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(stage_of(label) for label in labels))


def _defects(
    program: Program, x: Instruction, vocab_size: int, cache_numbers: int, large: int
) -> list[str]:
    fused = [x, *program.fused(x)]
    products = [y for y in fused if y.opcode in ("convolution", "dot")]
    names = []
    if x.opcode == "sort" and any(vocab_size in a.sizes for a in x.results):
        names.append(SORT)
    if _is_copy(program, x, cache_numbers):
        names.append(COPY)
        if x.label.endswith("scatter"):  # TPUs have a loop in place of the scatter
            names.append(SCATTER)
    if x.opcode.removesuffix("-done").removesuffix("-start") in _HOST or (
        x.opcode.endswith("-start") and any(a.space == 5 for a in x.results)
    ):
        names.append(HOST)
    # In place it is one kernel for all rows; where its neighbours have another layout, there are copies.
    scatters = largest(x) >= cache_numbers and any(y.opcode == "scatter" for y in fused)
    if scatters and any(_is_copy(program, y, cache_numbers) for y in _next_to(program, x)):
        names.append(SCATTER)
    sums = not products and any(y.opcode == "reduce" for y in fused)
    if sums and any(_multiplies(x, y) and largest(y) >= large for y in fused):
        names.append(ONE_ROW)
    if any(_is_float32(program, y, large) for y in products):
        names.append(FLOAT32)
    if x.opcode == "while" and not program.trips(x):
        names.append(LOOP)
    return names


def _multiplies(x: Instruction, y: Instruction) -> bool:
    """Whether `y` of a fusion `x` is the multiplication that replaces a matrix product."""
    return y.opcode == "multiply" and (y.label or x.label).endswith("dot_general")


def _is_copy(program: Program, x: Instruction, cache_numbers: int) -> bool:
    """Whether it only moves an array of the size of a cache, alone or as a fusion's last part."""
    last = program.computations[x.calls("calls")[0]][-1] if x.opcode == "fusion" else x
    return last.opcode in ("copy", "transpose") and largest(x) >= cache_numbers


def _next_to(program: Program, x: Instruction) -> list[Instruction]:
    """The maker of its first operand and the readers of its result, through instructions that pass values on."""
    neighbours: list[Instruction] = []
    maker = program.instructions.get(x.operands[0]) if x.operands else None
    while maker is not None and maker.opcode in PASSING and maker.operands:
        maker = program.instructions.get(maker.operands[0])
    neighbours += [maker] if maker is not None else []
    readers = list(program.readers.get(x.name, ()))
    while readers:
        reader = readers.pop()
        neighbours.append(reader)
        if reader.opcode in PASSING:
            readers += program.readers.get(reader.name, ())
    return neighbours


def _is_float32(program: Program, product: Instruction, large: int) -> bool:
    """Whether both operands of a product with a kernel are float32."""
    operands = [program.instructions.get(name) for name in product.operands[:2]]
    arrays = [y.results[0] for y in operands if y is not None and y.results]
    if len(arrays) < 2 or max(a.numbers for a in arrays) < large:
        return False
    return all(a.kind == "f32" for a in arrays)
