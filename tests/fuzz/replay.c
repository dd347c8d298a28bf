/* Runs a fuzz target once on each file of the folders given, without libFuzzer: the committed corpus is a
 * test of every build. A folder without files is a failure. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "tests/fuzz/fuzz.h"

#define MAX_BYTES ((size_t)1 << 20)

static int replay(const char *folder, const char *name)
{
    static uint8_t data[MAX_BYTES];
    char path[4096];

    (void)snprintf(path, sizeof(path), "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");

    if (!file) {
        (void)fprintf(stderr, "%s can not be read\n", path);
        return -1;
    }
    const size_t n = fread(data, 1, sizeof(data), file);

    (void)fclose(file);
    (void)LLVMFuzzerTestOneInput(data, n);
    return 0;
}

int main(int argc, char **argv)
{
    int status = argc > 1 ? 0 : 2;

    for (int i = 1; i < argc; i++) {
        DIR *dir = opendir(argv[i]);
        size_t n = 0;

        for (struct dirent *entry; dir && (entry = readdir(dir)) != NULL;) {
            if (entry->d_name[0] == '.') {
                continue;
            }
            n++;
            if (replay(argv[i], entry->d_name) < 0) {
                status = 1;
            }
        }
        if (dir) {
            (void)closedir(dir);
        }
        (void)printf("%s: %zu inputs\n", argv[i], n);
        if (n == 0) {
            status = 1;
        }
    }
    return status;
}
