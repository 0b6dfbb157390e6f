// Types of blocks with one level of scales.

#include "block_rows.h"

BlockFn PlainBlocks(int64_t form, int64_t rows, int64_t panels) {
  return BlocksFor<false>(form, rows, panels);
}
