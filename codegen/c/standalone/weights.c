/* Maps files of safetensors (https://github.com/huggingface/safetensors) and finds tensors in them. */

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runner.h"

/* Pages that a program writes to are copied: the file stays as it is. */
int fusion_map(const char *path, struct fusion_file *file) {
    struct stat status;
    const int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0 || fstat(descriptor, &status) != 0) {
        const int reason = errno;
        if (descriptor >= 0) close(descriptor);
        return fusion_fail("%s cannot be read: %s", path, strerror(reason));
    }
    file->bytes = status.st_size;
    file->start = NULL;
    if (file->bytes < 8) {
        close(descriptor);
        return fusion_fail("%s is not a file of safetensors: it is too short", path);
    }
    void *start = mmap(NULL, (size_t)file->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, descriptor, 0);
    const int reason = errno;
    close(descriptor);
    if (start == MAP_FAILED) return fusion_fail("%s cannot be mapped: %s", path, strerror(reason));
    file->start = start;
    return 0;
}

void fusion_unmap(struct fusion_file *file) {
    if (file->start != NULL) munmap(file->start, (size_t)file->bytes);
    file->start = NULL;
}

/* A place in the header; `ok` is 0 once something else was there than expected. */
struct text {
    const char *at, *end;
    int ok;
};

static int peek(struct text *text) {
    while (text->at < text->end && strchr(" \t\r\n", *text->at) != NULL) text->at++;
    return text->at < text->end ? (unsigned char)*text->at : 0;
}

static int take(struct text *text, char expected) {
    if (peek(text) != expected) return 0;
    text->at++;
    return 1;
}

static void expect(struct text *text, char expected) {
    if (!take(text, expected)) text->ok = 0;
}

static unsigned hexadecimal(struct text *text) {
    unsigned code = 0;
    for (int k = 0; k < 4; k++) {
        const char c = text->at < text->end ? *text->at++ : 0;
        const char *known = "0123456789abcdef", *place = c ? strchr(known, c | 32) : NULL;
        if (place == NULL) text->ok = 0;
        code = code * 16 + (unsigned)(place == NULL ? 0 : place - known);
    }
    return code;
}

/* Writes the character after a backslash in UTF-8, and returns its bytes. */
static int escaped(struct text *text, char *bytes) {
    const char *plain = "\"\\/bfnrt", *meaning = "\"\\/\b\f\n\r\t";
    const char c = text->at < text->end ? *text->at++ : 0;
    if (c != 'u') {
        const char *place = c ? strchr(plain, c) : NULL;
        if (place == NULL) text->ok = 0;
        bytes[0] = place == NULL ? 0 : meaning[place - plain];
        return 1;
    }
    unsigned code = hexadecimal(text);
    if (code >= 0xd800 && code < 0xdc00 && text->end - text->at > 6 && text->at[0] == '\\' && text->at[1] == 'u') {
        text->at += 2;
        code = 0x10000 + ((code - 0xd800) << 10) + (hexadecimal(text) - 0xdc00);
    }
    const int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    const unsigned lead[] = {0, 0xc0, 0xe0, 0xf0};
    for (int k = more; k > 0; k--, code >>= 6) bytes[k] = (char)(0x80 | (code & 0x3f));
    bytes[0] = (char)(lead[more] | code);
    return more + 1;
}

/* Reads a string, and returns whether it is `wanted`. */
static int string(struct text *text, const char *wanted) {
    size_t at = 0;
    const size_t length = strlen(wanted);
    int equal = 1;
    expect(text, '"');
    while (text->ok && text->at < text->end && *text->at != '"') {
        char bytes[4] = {*text->at++};
        const size_t count = bytes[0] == '\\' ? (size_t)escaped(text, bytes) : 1;
        equal = equal && at + count <= length && memcmp(wanted + at, bytes, count) == 0;
        at += count;
    }
    expect(text, '"');
    return equal && at == length;
}

static int64_t number(struct text *text) {
    int64_t value = 0;
    if (peek(text) < '0' || peek(text) > '9') text->ok = 0;
    while (text->at < text->end && *text->at >= '0' && *text->at <= '9' && value < INT64_MAX / 10 - 1)
        value = value * 10 + (*text->at++ - '0');
    return value;
}

/* Passes over a value of any kind. */
static void skip(struct text *text) {
    int depth = 0;
    do {
        const int c = peek(text);
        if (c == '"') {
            string(text, "");
            continue;
        }
        if (c == 0) text->ok = 0;
        depth += (c == '{' || c == '[') - (c == '}' || c == ']');
        text->at++;
        if (depth == 0 && c != '}' && c != ']')  /* a number or a word */
            while (text->at < text->end && strchr(",]} \t\r\n", *text->at) == NULL) text->at++;
    } while (text->ok && depth > 0);
}

/* What the header says about a tensor. */
struct entry {
    int dtype, shape, found;
    int64_t begin, end;
};

static void read_entry(struct text *text, const struct fusion_weight *weight, struct entry *entry) {
    expect(text, '{');
    do {
        const struct text key = *text;
        struct text copy = key;
        if (string(text, "dtype")) {
            expect(text, ':');
            entry->dtype = string(text, weight->dtype);
        } else if (string(&copy, "shape")) {
            int dim = 0, equal = 1;
            expect(text, ':');
            expect(text, '[');
            while (text->ok && peek(text) != ']') {
                const int64_t size = number(text);
                equal = equal && dim < weight->ndim && weight->shape[dim] == size;
                dim++;
                if (!take(text, ',')) break;
            }
            expect(text, ']');
            entry->shape = equal && dim == weight->ndim;
        } else if (copy = key, string(&copy, "data_offsets")) {
            expect(text, ':');
            expect(text, '[');
            entry->begin = number(text);
            expect(text, ',');
            entry->end = number(text);
            expect(text, ']');
        } else {
            expect(text, ':');
            skip(text);
        }
    } while (text->ok && take(text, ','));
    expect(text, '}');
}

char *fusion_find(const struct fusion_file *file, const struct fusion_weight *weight) {
    uint64_t header = 0;
    for (int k = 7; k >= 0; k--) header = header << 8 | (unsigned char)file->start[k];
    struct entry entry = {0};
    if (header > (uint64_t)(file->bytes - 8)) {
        fusion_fail("the weights are not in the safetensors format: the header is too long");
        return NULL;
    }
    struct text text = {file->start + 8, file->start + 8 + header, 1};
    expect(&text, '{');
    while (text.ok && peek(&text) == '"') {
        const int same = string(&text, weight->name);
        expect(&text, ':');
        if (same) {
            entry.found = 1;
            read_entry(&text, weight, &entry);
            break;
        }
        skip(&text);
        if (!take(&text, ',')) break;
    }
    int64_t bytes = weight->item;
    for (int dim = 0; dim < weight->ndim; dim++) bytes *= weight->shape[dim];
    const int64_t room = file->bytes - 8 - (int64_t)header;
    if (!text.ok)
        fusion_fail("the weights are not in the safetensors format");
    else if (!entry.found)
        fusion_fail("the weights have no %s", weight->name);
    else if (!entry.dtype || !entry.shape)
        fusion_fail("%s has another dtype or shape in the weights than the program was exported for", weight->name);
    else if (entry.begin < 0 || entry.end > room || entry.end - entry.begin != bytes)
        fusion_fail("%s has other bytes in the weights than its shape says", weight->name);
    else
        return file->start + 8 + header + entry.begin;
    return NULL;
}
