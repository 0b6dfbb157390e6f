// Products with activations of 16 bits.

#include "integers.h"

IntegerFn IntegersOf16(int64_t form, int64_t rows) { return FindIntegers<16>(form, rows); }
