/* A scratch folder; see folder.h. Process-wide state, used by the one thread of a fuzz target. */
#include "tests/fuzz/folder.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include "common/base/assert.h"

#define MAX_NAMES 8

static char folder[64];
static const char *names[MAX_NAMES]; /* of all files ever put there */

static void join(const char *name, char ret_path[128])
{
    (void)snprintf(ret_path, 128, "%s/%s", fuzz_folder(), name);
}

static void remove_all(void)
{
    for (size_t i = 0; i < MAX_NAMES && names[i]; i++) {
        fuzz_folder_drop(names[i]);
    }
    (void)rmdir(folder);
}

const char *fuzz_folder(void)
{
    if (!folder[0]) {
        (void)snprintf(folder, sizeof(folder), "/tmp/damask-fuzz-XXXXXX");
        dmk_assert(mkdtemp(folder));
        dmk_assert(atexit(remove_all) == 0);
    }
    return folder;
}

void fuzz_folder_put(const char *name, struct dmk_bytes content)
{
    char path[128];
    size_t i = 0;
    int fd;

    while (names[i] && strcmp(names[i], name) != 0) {
        i++;
        dmk_assert(i < MAX_NAMES);
    }
    names[i] = name;
    join(name, path);
    fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    dmk_assert(fd >= 0);
    dmk_assert(content.len == 0 || write(fd, content.data, content.len) == (ssize_t)content.len);
    (void)close(fd);
}

void fuzz_folder_drop(const char *name)
{
    char path[128];

    join(name, path);
    dmk_assert(unlink(path) == 0 || errno == ENOENT);
}
