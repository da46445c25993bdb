// Opens a model with damaged weights, again and again: each time it is refused, or opened and closed.
//
//     damage WEIGHTS COPY TIMES

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <string>

#include "fusion.h"

int main(int count, char **arguments) {
    if (count != 4) return 1;
    std::ifstream file(arguments[1], std::ios::binary);
    const std::string whole((std::istreambuf_iterator<char>(file)), {});
    size_t header = 0;
    for (int k = 7; k >= 0; k--) header = header << 8 | static_cast<unsigned char>(whole[k]);
    const std::string telling = "\"{}[],:0123456789\\u \x80";
    std::mt19937 random(1);
    int opened = 0, refused = 0;
    for (int left = std::atoi(arguments[3]); left > 0; left--) {
        std::string damaged = whole;
        for (unsigned changes = 1 + random() % 4; changes > 0; changes--) {
            const size_t at = random() % 4 ? 8 + random() % header : random() % 8;
            damaged[at] = random() % 5 ? telling[random() % telling.size()] : static_cast<char>(random());
        }
        if (random() % 7 == 0) damaged.resize(random() % damaged.size());
        std::ofstream(arguments[2], std::ios::binary) << damaged;
        fusion_model *model = fusion_open(arguments[2]);
        (model == nullptr ? refused : opened)++;
        fusion_close(model);
    }
    std::printf("%d %d\n", opened, refused);
    return 0;
}
