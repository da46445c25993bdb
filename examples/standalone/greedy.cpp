// Generates tokens with a language model that Fusion has exported, without Python and PyTorch.
//
//     greedy NUMBER TOKEN...      prints NUMBER tokens that follow, the most likely one each time
//
// The model takes tokens, int64[1, length], and returns scores, float32[1, length, words].

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <vector>

#include "fusion.h"

namespace {

class Model {
  public:
    explicit Model(const char *weights = nullptr) : model_(fusion_open(weights)) {
        if (model_ == nullptr) throw std::runtime_error(fusion_error());
    }
    ~Model() { fusion_close(model_); }
    Model(const Model &) = delete;
    Model &operator=(const Model &) = delete;

    // Returns the most likely next token.
    int64_t next(std::vector<int64_t> &tokens) const {
        int64_t shape[] = {1, static_cast<int64_t>(tokens.size())};
        DLTensor input{};
        input.data = tokens.data();
        input.device = {kDLCPU, 0};
        input.ndim = 2;
        input.dtype = {kDLInt, 64, 1};
        input.shape = shape;
        const DLTensor *inputs[] = {&input};
        DLManagedTensor *outputs[] = {nullptr};
        if (fusion_run(model_, inputs, outputs) != 0) throw std::runtime_error(fusion_error());
        const DLTensor &scores = outputs[0]->dl_tensor;
        const int64_t words = scores.shape[2];
        const float *last = static_cast<const float *>(scores.data) + (scores.shape[1] - 1) * scores.strides[1];
        const int64_t best = std::max_element(last, last + words) - last;
        outputs[0]->deleter(outputs[0]);
        return best;
    }

  private:
    fusion_model *model_;
};

}  // namespace

int main(int count, char **arguments) {
    try {
        if (count < 3) throw std::runtime_error("usage: greedy NUMBER TOKEN...");
        std::vector<int64_t> tokens;
        for (int k = 2; k < count; k++) tokens.push_back(std::strtoll(arguments[k], nullptr, 10));
        const Model model;
        for (long left = std::strtol(arguments[1], nullptr, 10); left > 0; left--) {
            tokens.push_back(model.next(tokens));
            std::printf("%lld\n", static_cast<long long>(tokens.back()));
        }
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}
