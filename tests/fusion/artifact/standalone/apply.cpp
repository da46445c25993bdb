// Applies an exported model to files of numbers, in several threads at once, without Python.
//
//     apply THREADS RESULT SHAPE FILE...      such as: apply 4 y.bin 4x24 x.bin
//
// Inputs are of the dtypes that the model says.  Every thread runs the model, and all results have to be equal in each
// byte; RESULT gets the bytes of the first output.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "fusion.h"

struct Input {
    std::vector<int64_t> shape;
    std::vector<char> data;
    DLTensor tensor{};

    Input(const char *sizes, const char *path, const fusion_tensor &described) {
        for (char *end = nullptr; *sizes != 0; sizes = *end == 'x' ? end + 1 : end) shape.push_back(std::strtoll(sizes, &end, 10));
        std::ifstream file(path, std::ios::binary);
        if (!file) throw std::runtime_error(std::string("there is no ") + path);
        data.assign(std::istreambuf_iterator<char>(file), {});
        tensor.data = data.data();
        tensor.device = {kDLCPU, 0};
        tensor.ndim = static_cast<int32_t>(shape.size());
        tensor.dtype = described.dtype;
        tensor.shape = shape.data();
    }
};

static std::string run(fusion_model *model, const std::vector<const DLTensor *> &inputs) {
    std::vector<DLManagedTensor *> outputs(static_cast<size_t>(fusion_output_count()), nullptr);
    if (fusion_run(model, inputs.data(), outputs.data()) != 0) return std::string("!") + fusion_error();
    const DLTensor &first = outputs[0]->dl_tensor;
    size_t bytes = first.dtype.bits / 8;
    for (int dim = 0; dim < first.ndim; dim++) bytes *= static_cast<size_t>(first.shape[dim]);
    const std::string result(static_cast<const char *>(first.data), bytes);
    for (DLManagedTensor *output : outputs) output->deleter(output);
    return result;
}

int main(int count, char **arguments) {
    try {
        std::vector<Input *> held;
        std::vector<const DLTensor *> inputs;
        for (int k = 3; k + 1 < count; k += 2) {
            held.push_back(new Input(arguments[k], arguments[k + 1], *fusion_input((k - 3) / 2)));
            inputs.push_back(&held.back()->tensor);
        }
        fusion_model *model = fusion_open(nullptr);
        if (model == nullptr) throw std::runtime_error(fusion_error());
        std::vector<std::string> results(static_cast<size_t>(std::atoi(arguments[1])));
        std::vector<std::thread> threads;
        for (std::string &result : results)
            threads.emplace_back([&] { for (int k = 0; k < 5; k++) result = run(model, inputs); });
        for (std::thread &thread : threads) thread.join();
        for (const std::string &result : results) {
            if (!result.empty() && result[0] == '!') throw std::runtime_error(result.substr(1));
            if (result != results[0]) throw std::runtime_error("threads differ");
        }
        std::ofstream(arguments[2], std::ios::binary) << results[0];
        fusion_close(model);
        for (Input *input : held) delete input;
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}
