"""Peak figures of accelerators: arithmetic, memory bandwidth, memory, links.

Used for predictions without measurement. Figures are the vendors', for one chip: arithmetic is
dense (no structured sparsity) in bfloat16, accumulated in float32.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One accelerator.

    Attributes:
      flops: peak FLOP/s.
      bandwidth: bytes per second between the chip and its memory.
      memory: bytes.
      link: bytes per second, in plus out, summed over all links to its neighbours.
      clock: Hz, of TPUs: the compiler's cycles.
    """

    title: str
    flops: float
    bandwidth: float
    memory: float
    link: float
    clock: float = 0.0

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which arithmetic is the limit, not memory."""
        return self.flops / self.bandwidth


CHIPS = {
    # NVIDIA A100 datasheet (2021): 312 TFLOP/s; 1,935 GB/s (PCIe) and 2,039 GB/s (SXM) with
    # 80 GB; NVLink 600 GB/s. The Medusa paper's A100 is the PCIe card.
    "a100": Chip("A100 80GB PCIe", 312e12, 1.935e12, 80e9, 600e9),
    "a100-sxm": Chip("A100 80GB SXM", 312e12, 2.039e12, 80e9, 600e9),
    # NVIDIA A40 datasheet: 149.7 TFLOP/s (299.4 with sparsity), 696 GB/s, NVLink 112.5 GB/s.
    "a40": Chip("A40", 149.7e12, 696e9, 48e9, 112.5e9),
    # NVIDIA GA102 whitepaper, table of the RTX A6000: 154.8 TFLOP/s, 768 GB/s; NVLink 112.5 GB/s.
    "a6000": Chip("RTX A6000", 154.8e12, 768e9, 48e9, 112.5e9),
    # NVIDIA H100 datasheet, SXM: 1,979 TFLOP/s with sparsity, 3.35 TB/s, NVLink 900 GB/s.
    "h100": Chip("H100 SXM", 989.4e12, 3.35e12, 80e9, 900e9),
    # NVIDIA H200 datasheet, SXM: arithmetic of the H100, 4.8 TB/s, 141 GB.
    "h200": Chip("H200 SXM", 989.4e12, 4.8e12, 141e9, 900e9),
    # Cloud TPU documentation, one page per version. Bandwidths are from its 2025 tables; later ones
    # round them to 800 and 1,600 GB/s. Links: 2,400, 1,600, 4,800 and 3,200 Gbit/s per chip. Clocks:
    # peak arithmetic over that of the matrix units in a cycle (8 and 4 and 8 of 128 x 128, 4 of 256 x 256).
    "tpu-v4": Chip("TPU v4", 275e12, 1.228e12, 32e9, 300e9, 1.05e9),
    "tpu-v5e": Chip("TPU v5e", 197e12, 819e9, 16e9, 200e9, 1.5e9),
    "tpu-v5p": Chip("TPU v5p", 459e12, 2.765e12, 95e9, 600e9, 1.75e9),
    "tpu-v6e": Chip("TPU v6e", 918e12, 1.64e12, 32e9, 400e9, 1.75e9),
}
