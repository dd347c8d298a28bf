/* Fuzz target of the safetensors reader: the input is a file. Checked: it is refused with a sentence that
 * names it, or all its tensors lie in the data section, side by side, with the sizes that they state. */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "common/base/assert.h"
#include "common/model/safetensors.h"
#include "tests/fuzz/fuzz.h"

static void check_tensors(const struct dmk_safetensors *file)
{
    const struct dmk_bytes data = dmk_safetensors_data(file);
    const uint8_t *end = data.data;

    for (size_t i = 0; i < dmk_safetensors_count(file); i++) {
        const struct dmk_tensor *t = dmk_safetensors_at(file, i);
        uint64_t bytes = dmk_dtype_bytes(t->dtype);

        dmk_assert(t->name[0] != '\0' && t->rank <= DMK_TENSOR_MAX_RANK);
        for (uint32_t d = 0; d < t->rank; d++) {
            bytes *= t->dims[d]; /* wraps only where a dimension is 0 */
        }
        dmk_assert(t->n_bytes == bytes);
        dmk_assert(t->data == end);
        end += t->n_bytes;
    }
    dmk_assert(end == data.data + data.len);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const int fd = memfd_create("fuzz", 0);
    struct dmk_safetensors *file = NULL;
    struct dmk_error err = {0};
    char path[64];

    dmk_assert(fd >= 0);
    dmk_assert(write(fd, data, size) == (ssize_t)size);
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    if (dmk_safetensors_open(path, &file, &err) < 0) {
        dmk_assert(file == NULL && err.status < 0);
        dmk_assert(strncmp(err.text, path, strlen(path)) == 0);
    } else {
        check_tensors(file);
        dmk_safetensors_close(&file);
    }
    close(fd);
    return 0;
}
