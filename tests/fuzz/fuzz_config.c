/* Fuzz target of config.json and generation_config.json.
 *
 * Input: config.json, and generation_config.json behind the first NUL, where there is one. Checked: the files
 * are refused with a sentence, or the dimensions pass the check that every user of them relies on. */
#include "common/base/assert.h"
#include "common/model/config.h"
#include "tests/fuzz/folder.h"
#include "tests/fuzz/fuzz.h"

static const char generation[] = "generation_config.json";

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint8_t *nul = size ? memchr(data, 0, size) : NULL;
    const size_t len = nul ? (size_t)(nul - data) : size;
    struct dmk_config config;
    struct dmk_error err = {0};

    fuzz_folder_put("config.json", (struct dmk_bytes){data, len});
    if (nul) {
        fuzz_folder_put(generation, (struct dmk_bytes){nul + 1, size - len - 1});
    } else {
        fuzz_folder_drop(generation);
    }
    memset(&config, 0xa5, sizeof(config));
    if (dmk_config_load(fuzz_folder(), NULL, &config, &err) < 0) {
        dmk_assert(err.status < 0 && strstr(err.text, fuzz_folder()));
        return 0;
    }
    dmk_assert(dmk_shape_check(&config.shape, &err) == 0);
    dmk_assert(config.shape.n_eos <=
               DMK_MAX_EOS); /* 0: none are named, and the usual ones mean nothing */
    for (uint32_t i = 0; i < config.shape.n_eos; i++) {
        dmk_assert(config.shape.eos_ids[i] < config.shape.vocab);
    }
    dmk_assert(config.layout == DMK_CONFIG_HF || config.layout == DMK_CONFIG_ORIGINAL);
    return 0;
}
