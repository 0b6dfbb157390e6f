// The products with panels in one form, and with activations of one width: a library.

#include "floats.h"
#include "tiles.h"

extern "C" void MEDUSA_NAME(const void* part, const uint32_t* panel, int64_t panels, const void* x, int64_t from,
                            int64_t end, float* sums) {
  const Part& of = *static_cast<const Part*>(part);
  const Rows& rows = *static_cast<const Rows*>(x);
  if constexpr (MEDUSA_FORM < kInt8)
    MultiplyFloats<MEDUSA_FORM>(of, panel, rows, from, end, sums);
  else
    MultiplyAny<BlocksOf<MEDUSA_FORM>, MEDUSA_BITS>(of, panel, panels, rows, from, end, sums);
}
