/* Sums that tell changed bytes: CRC-32 (ISO 3309, as zlib's crc32), eight bytes at a time. */

#include <string.h>

#include "runner.h"

enum { AT_ONCE = 8, BYTES = 256 };

static uint32_t table[AT_ONCE][BYTES];
static pthread_once_t filled = PTHREAD_ONCE_INIT;

static void fill(void) {
    for (uint32_t byte = 0; byte < BYTES; byte++) {
        uint32_t sum = byte;
        for (int bit = 0; bit < 8; bit++) sum = sum >> 1 ^ (sum & 1 ? 0xEDB88320u : 0);
        table[0][byte] = sum;
    }
    for (int k = 1; k < AT_ONCE; k++)
        for (int byte = 0; byte < BYTES; byte++)
            table[k][byte] = table[k - 1][byte] >> 8 ^ table[0][table[k - 1][byte] & 0xFF];
}

uint32_t fusion_sum(const char *start, int64_t bytes) {
    const unsigned char *at = (const unsigned char *)start, *const end = at + bytes;
    uint32_t sum = 0xFFFFFFFFu;
    pthread_once(&filled, fill);
    for (; end - at >= AT_ONCE; at += AT_ONCE) {
        uint32_t next = 0;
        for (int k = 0; k < 4; k++) next ^= table[7 - k][at[k] ^ (sum >> 8 * k & 0xFF)];
        for (int k = 4; k < AT_ONCE; k++) next ^= table[7 - k][at[k]];
        sum = next;
    }
    while (at < end) sum = sum >> 8 ^ table[0][*at++ ^ (sum & 0xFF)];
    return ~sum;
}
