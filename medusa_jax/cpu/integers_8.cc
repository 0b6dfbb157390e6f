// Products with activations of 8 bits.

#include "integers.h"

IntegerFn IntegersOf8(int64_t form, int64_t rows) { return FindIntegers<8>(form, rows); }
