// Types of blocks with two levels of scales.

#include "block_rows.h"

BlockFn LevelBlocks(int64_t form, int64_t rows, int64_t panels) {
  return BlocksFor<true>(form, rows, panels);
}
