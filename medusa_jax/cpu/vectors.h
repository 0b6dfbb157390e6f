// Vectors as wide as the machine's registers.
//
// The code is compiled for the CPU that runs it (compiler.py), so the compiler knows the width. The vector
// extensions of GCC and Clang serve AVX2, AVX-512 and NEON with one source. Operations that they lack (multiply-adds,
// widening of narrow numbers, products of integers) have a form for each, and a portable one.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRows = 12;  // 32 registers: 24 sums, 2 of weights, the rest to work with
#elif defined(__AVX__)
constexpr int kLanes = 8, kRows = 6;  // 16 registers: 12 sums
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRows = 12;  // 32 registers
#else
constexpr int kLanes = 4, kRows = 6;
#endif
typedef float Vector __attribute__((vector_size(kLanes * 4)));
typedef float Unaligned __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef int16_t Shorts __attribute__((vector_size(kLanes * 2)));
typedef int8_t Narrow __attribute__((vector_size(kLanes)));
typedef uint16_t Sixteens __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UnalignedWords __attribute__((vector_size(kLanes * 4), aligned(4)));

inline Vector Load(const float* at) { return *reinterpret_cast<const Unaligned*>(at); }
inline Words LoadWords(const uint32_t* at) { return *reinterpret_cast<const UnalignedWords*>(at); }
inline void Store(float* at, Vector x) { *reinterpret_cast<Unaligned*>(at) = x; }
inline Vector Spread(float x) { return x - Vector{}; }

// a * b + c, rounded once if the machine can. The compiler must not choose (-ffp-contract=off): for some processors
// GCC rounds the product in one loop and not in another, and a row's bits would depend on the number of rows.
inline Vector MulAdd(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
  return Vector(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
#elif defined(__FMA__) && defined(__AVX2__)
  return Vector(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
#elif defined(__aarch64__)
  return Vector(vfmaq_f32(float32x4_t(c), float32x4_t(a), float32x4_t(b)));
#else
  return a * b + c;
#endif
}

// Keeps x in a register; GCC would load it from memory again at every use.
template <typename Any>
inline void InRegister(Any& x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
}

// `kByteDots`: one operation sums four products of bytes. `kSignedBytes`: it takes signed bytes only. `kShortDots`: one
// operation sums two products of bytes, in 16 bits.
#if defined(__ARM_FEATURE_DOTPROD)
constexpr bool kByteDots = true, kSignedBytes = true, kShortDots = false;
#elif defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
constexpr bool kByteDots = true, kSignedBytes = false, kShortDots = false;
#elif defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool kByteDots = false, kSignedBytes = false, kShortDots = true;
#else
constexpr bool kByteDots = false, kSignedBytes = false, kShortDots = false;
#endif

// sum + w0 x0 + w1 x1 in each lane, of w and x with two numbers of 16 bits.
inline Ints DotPairs(Ints sum, Words w, Words x) {
#if defined(__AVX512VNNI__)
  return Ints(_mm512_dpwssd_epi32(__m512i(sum), __m512i(w), __m512i(x)));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  return Ints(_mm256_dpwssd_avx_epi32(__m256i(sum), __m256i(w), __m256i(x)));
#elif defined(__AVX512BW__)
  return sum + Ints(_mm512_madd_epi16(__m512i(w), __m512i(x)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return sum + Ints(_mm256_madd_epi16(__m256i(w), __m256i(x)));
#elif defined(__aarch64__)
  const int32x4_t ws = int32x4_t(w), xs = int32x4_t(x);
  const int32x4_t first = vmlal_s16(int32x4_t(sum), vmovn_s32(ws), vmovn_s32(xs));
  return Ints(vmlal_s16(first, vshrn_n_s32(ws, 16), vshrn_n_s32(xs, 16)));
#else
  return sum + Ints(w & 0xffffu) * (Ints(x << 16) >> 16) + Ints(w >> 16) * (Ints(x) >> 16);
#endif
}

// sum + w0 x0 + ... + w3 x3 in each lane, of w and x with four bytes; only where `kByteDots`.
inline Ints DotBytes(Ints sum, Words w, Words x) {
#if defined(__ARM_FEATURE_DOTPROD)
  return Ints(vdotq_s32(int32x4_t(sum), int8x16_t(w), int8x16_t(x)));
#elif defined(__AVX512VNNI__)
  return Ints(_mm512_dpbusd_epi32(__m512i(sum), __m512i(w), __m512i(x)));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  return Ints(_mm256_dpbusd_avx_epi32(__m256i(sum), __m256i(w), __m256i(x)));
#else
  return sum;
#endif
}

// sum + [w0 x0 + w1 x1, w2 x2 + w3 x3] in numbers of 16 bits; only where `kShortDots`. Codes with a sign lend it to x.
template <bool kSigned>
inline Words DotShort(Words sum, Words w, Words x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i size = kSigned ? _mm256_abs_epi8(__m256i(w)) : __m256i(w);
  const __m256i by = kSigned ? _mm256_sign_epi8(__m256i(x), __m256i(w)) : __m256i(x);
  return Words(_mm256_add_epi16(__m256i(sum), _mm256_maddubs_epi16(size, by)));
#else
  return sum;
#endif
}

// kLanes float16 as float32, exactly. Infinities and NaN do not occur (`pack.h` refuses them).
inline Vector Halves(const uint16_t* at) {
#if defined(__AVX512F__)
  return Vector(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))));
#elif defined(__F16C__) && defined(__AVX2__)
  return Vector(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
#elif defined(__aarch64__)
  return Vector(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at))));
#else
  Ints half;
  for (int i = 0; i < kLanes; ++i) half[i] = at[i];
  const Ints exponent = half & 0x7c00, fraction = half & 0x3ff;
  // Numbers below the smallest exponent are multiples of 2^-24. No float32 on the way is that small: these
  // threads take such numbers for zero.
  const Vector least = __builtin_convertvector(fraction, Vector) * 0x1p-24f;
  const Ints usual = ((half & 0x7fff) << 13) + (112 << 23);
  Ints small;
  std::memcpy(&small, &least, sizeof small);
  const Ints bits = (exponent == 0 ? small : usual) | (half & 0x8000) << 16;
  return reinterpret_cast<Vector>(bits);
#endif
}

// kLanes bytes, with or without a sign, as float32.
template <bool kSigned>
inline Vector Bytes(const uint8_t* at) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  const Ints wide = Ints(kSigned ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at));
  const Ints wide = Ints(kSigned ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
  Ints wide;
  for (int i = 0; i < kLanes; ++i) wide[i] = kSigned ? int8_t(at[i]) : at[i];
#endif
  return __builtin_convertvector(wide, Vector);
}

template <int n, typename T>
struct Lanes {
  typedef T Type __attribute__((vector_size(n * 4)));
};

// Folds n lanes to one, halves first, in registers: a loop over an array of lanes would go through memory.
template <int n, typename X, typename Fold>
inline auto FoldOf(X x, const Fold& fold) {
  if constexpr (n == 1) {
    return x[0];
  } else {
    typename Lanes<n / 2, std::decay_t<decltype(x[0])>>::Type halves[2];
    std::memcpy(halves, &x, sizeof x);
    return FoldOf<n / 2>(fold(halves[0], halves[1]), fold);
  }
}

template <int n, typename X>
inline auto SumOf(X x) {
  return FoldOf<n>(x, [](auto a, auto b) { return a + b; });
}

inline float Sum(Vector x) { return SumOf<kLanes>(x); }

// In every 2 d lanes: d lanes of a, then d of b, each from its lane `from` on.
template <int d, int from, int... l>
inline Vector Mixed(Vector a, Vector b, std::integer_sequence<int, l...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (l / (2 * d) * 2 * d + l % d + from + (l & d ? kLanes : 0))...);
#else
  return __builtin_shuffle(a, b, Ints{(l / (2 * d) * 2 * d + l % d + from + (l & d ? kLanes : 0))...});
#endif
}

// exp(x) for x <= 0 to 2 units in the last place: 2^n exp(r) with x = n ln 2 + r, |r| <= ln 2 / 2, and the
// series of exp(r) to r^7 / 5040. Zero below -87, where float32 ends.
inline Vector Exp(Vector x) {
  const Vector zero = {};
  const Vector least = zero - 87.0f;
  const auto nothing = x < least;
  x = nothing ? least : x;
  // Adding 1.5 x 2^23 rounds to a whole number, which is then in the lower bits.
  const float kRound = 12582912.0f;
  const Vector shifted = MulAdd(x, Spread(1.44269504088896341f), Spread(kRound));
  const Vector n = shifted - kRound;
  const Vector r = MulAdd(n, Spread(2.12194440e-4f), MulAdd(n, Spread(-0.693359375f), x));
  Vector y = zero + 1.0f / 5040;
#pragma GCC unroll 8
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    y = MulAdd(y, r, Spread(c));
  Ints power;
  std::memcpy(&power, &shifted, sizeof power);
  power = (power << 23) + (127 << 23);
  Vector scale;
  std::memcpy(&scale, &power, sizeof scale);
  return nothing ? zero : y * scale;
}

}  // namespace
