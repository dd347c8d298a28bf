/* Fuzz target of a checkpoint's index: any model.safetensors.index.json beside two data files.
 *
 * a.safetensors holds the tensors "a" and "both", b.safetensors "b". Checked: the index is refused with a
 * sentence, or the tensors come sorted, each once, each from a file of the folder, and are found by name. */
#include "common/base/assert.h"
#include "common/model/checkpoint.h"
#include "tests/fuzz/folder.h"
#include "tests/fuzz/fuzz.h"

static void put_safetensors(const char *name, const char *header)
{
    const size_t len = strlen(header);
    uint8_t file[512] = {(uint8_t)len};

    dmk_assert(len < 256);
    memcpy(file + 8, header, len);
    memset(file + 8 + len, 7, 8); /* data of all tensors: 8 bytes */
    fuzz_folder_put(name, (struct dmk_bytes){file, 8 + len + 8});
}

static void check(const struct dmk_checkpoint *ckpt)
{
    for (size_t i = 0; i < dmk_checkpoint_count(ckpt); i++) {
        const struct dmk_checkpoint_entry *e = dmk_checkpoint_at(ckpt, i);
        size_t at = SIZE_MAX;

        dmk_assert(strncmp(e->path, fuzz_folder(), strlen(fuzz_folder())) == 0);
        dmk_assert(i == 0 ||
                   strcmp(dmk_checkpoint_at(ckpt, i - 1)->tensor->name, e->tensor->name) < 0);
        dmk_assert(dmk_checkpoint_find(ckpt, e->tensor->name, &at) == e && at == i);
    }
    dmk_assert(!dmk_checkpoint_find(ckpt, "no such tensor", NULL));
    dmk_assert(dmk_checkpoint_n_files(ckpt) >= 1 && dmk_checkpoint_n_files(ckpt) <= 2);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static bool ready;
    struct dmk_checkpoint *ckpt = NULL;
    struct dmk_error err = {0};

    if (!ready) {
        put_safetensors("a.safetensors",
                        "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
                        "\"both\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]}}");
        put_safetensors("b.safetensors",
                        "{\"b\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]}}");
        ready = true;
    }
    fuzz_folder_put("model.safetensors.index.json", (struct dmk_bytes){data, size});
    if (dmk_checkpoint_open(fuzz_folder(), &ckpt, &err) < 0) {
        dmk_assert(!ckpt && err.status < 0 && err.text[0]);
        return 0;
    }
    check(ckpt);
    dmk_checkpoint_close(&ckpt);
    return 0;
}
