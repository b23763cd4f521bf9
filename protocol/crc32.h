/* CRC-32 (IEEE), as zlib computes it. A processor with the instruction PCLMULQDQ folds 64 bytes at a time (Gopal et al., "Fast
   CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction"); the constants are those of that paper and of zlib-ng.
   Other processors look up 16 bytes at a time in tables. */
#ifndef ROCKETLET_CRC32_H
#define ROCKETLET_CRC32_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>
static uint32_t crc_table[16][256];
static int crc_has_clmul;

static void crc_init(void) {
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t c = n;
        for (int k = 0; k < 8; k++) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
        crc_table[0][n] = c;
    }
    for (int t = 1; t < 16; t++)
        for (uint32_t n = 0; n < 256; n++)
            crc_table[t][n] = crc_table[0][crc_table[t - 1][n] & 0xFF] ^ (crc_table[t - 1][n] >> 8);
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    crc_has_clmul = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
#endif
}

static uint32_t crc_by_tables(uint32_t crc, const uint8_t *p, size_t n) { /* `crc` is inverted */
    while (n >= 16) {
        uint32_t a, b, c, d;
        memcpy(&a, p, 4); memcpy(&b, p + 4, 4); memcpy(&c, p + 8, 4); memcpy(&d, p + 12, 4);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        a = __builtin_bswap32(a); b = __builtin_bswap32(b); c = __builtin_bswap32(c); d = __builtin_bswap32(d);
#endif
        a ^= crc;
        crc = crc_table[15][a & 255] ^ crc_table[14][a >> 8 & 255] ^ crc_table[13][a >> 16 & 255] ^ crc_table[12][a >> 24]
            ^ crc_table[11][b & 255] ^ crc_table[10][b >> 8 & 255] ^ crc_table[9][b >> 16 & 255] ^ crc_table[8][b >> 24]
            ^ crc_table[7][c & 255] ^ crc_table[6][c >> 8 & 255] ^ crc_table[5][c >> 16 & 255] ^ crc_table[4][c >> 24]
            ^ crc_table[3][d & 255] ^ crc_table[2][d >> 8 & 255] ^ crc_table[1][d >> 16 & 255] ^ crc_table[0][d >> 24];
        p += 16; n -= 16;
    }
    while (n--) crc = crc_table[0][(crc ^ *p++) & 255] ^ (crc >> 8);
    return crc;
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
__attribute__((target("pclmul,sse4.1")))
static uint32_t crc_by_clmul(uint32_t crc, const uint8_t *p, size_t n) { /* n >= 64 and a multiple of 16 */
    const __m128i k12 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4), k34 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i k5 = _mm_set_epi64x(0, 0x0163cd6124), poly = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    __m128i x0, x1, x2, x3, x4, x5, x6, x7, x8;
    x1 = _mm_loadu_si128((const __m128i *)p); x2 = _mm_loadu_si128((const __m128i *)(p + 16));
    x3 = _mm_loadu_si128((const __m128i *)(p + 32)); x4 = _mm_loadu_si128((const __m128i *)(p + 48));
    x1 = _mm_xor_si128(x1, _mm_cvtsi32_si128((int)crc));
    p += 64; n -= 64;
    while (n >= 64) {
        x5 = _mm_clmulepi64_si128(x1, k12, 0x00); x6 = _mm_clmulepi64_si128(x2, k12, 0x00);
        x7 = _mm_clmulepi64_si128(x3, k12, 0x00); x8 = _mm_clmulepi64_si128(x4, k12, 0x00);
        x1 = _mm_clmulepi64_si128(x1, k12, 0x11); x2 = _mm_clmulepi64_si128(x2, k12, 0x11);
        x3 = _mm_clmulepi64_si128(x3, k12, 0x11); x4 = _mm_clmulepi64_si128(x4, k12, 0x11);
        x1 = _mm_xor_si128(_mm_xor_si128(x1, x5), _mm_loadu_si128((const __m128i *)p));
        x2 = _mm_xor_si128(_mm_xor_si128(x2, x6), _mm_loadu_si128((const __m128i *)(p + 16)));
        x3 = _mm_xor_si128(_mm_xor_si128(x3, x7), _mm_loadu_si128((const __m128i *)(p + 32)));
        x4 = _mm_xor_si128(_mm_xor_si128(x4, x8), _mm_loadu_si128((const __m128i *)(p + 48)));
        p += 64; n -= 64;
    }
#define FOLD(y) x5 = _mm_clmulepi64_si128(x1, k34, 0x00); x1 = _mm_clmulepi64_si128(x1, k34, 0x11); \
                x1 = _mm_xor_si128(_mm_xor_si128(x1, y), x5);
    FOLD(x2) FOLD(x3) FOLD(x4)
    while (n >= 16) { x2 = _mm_loadu_si128((const __m128i *)p); FOLD(x2) p += 16; n -= 16; }
    x2 = _mm_clmulepi64_si128(x1, k34, 0x10);
    x3 = _mm_setr_epi32(~0, 0, ~0, 0);
    x1 = _mm_srli_si128(x1, 8); x1 = _mm_xor_si128(x1, x2);
    x0 = k5; x2 = _mm_srli_si128(x1, 4); x1 = _mm_and_si128(x1, x3);
    x1 = _mm_clmulepi64_si128(x1, x0, 0x00); x1 = _mm_xor_si128(x1, x2);
    x0 = poly; x2 = _mm_and_si128(x1, x3); x2 = _mm_clmulepi64_si128(x2, x0, 0x10);
    x2 = _mm_and_si128(x2, x3); x2 = _mm_clmulepi64_si128(x2, x0, 0x00); x1 = _mm_xor_si128(x1, x2);
    return (uint32_t)_mm_extract_epi32(x1, 1);
}
#endif

/* Return the CRC-32 of bytes that follow others whose CRC-32 is `before`. */
static uint32_t crc32_of(uint32_t before, const uint8_t *p, size_t n) {
    uint32_t crc = ~before;
#if defined(__x86_64__) && defined(__GNUC__)
    if (crc_has_clmul && n >= 64) {
        size_t whole = n & ~(size_t)15;
        crc = crc_by_clmul(crc, p, whole);
        p += whole; n -= whole;
    }
#endif
    return ~crc_by_tables(crc, p, n);
}
#endif
