/* replay.c - runs a fuzz target on the files of a folder. usage: fuzz_NAME FOLDER */
#include <dirent.h>
#include <string.h>

#include "fuzz.h"

static int replay(const char *folder, const char *name)
{
    char path[512];
    FILE *f;
    uint8_t *data = NULL;
    size_t size = 0, n;

    snprintf(path, sizeof path, "%s/%s", folder, name);
    f = fopen(path, "rb");
    if (!f) {
        perror(path);
        return 1;
    }
    do {
        uint8_t *grown = realloc(data, size + 4096);
        if (!grown)
            abort();
        data = grown;
        n = fread(data + size, 1, 4096, f);
        size += n;
    } while (n);
    fclose(f);
    data = realloc(data, size ? size : 1); /* so that a byte too far is noticed */
    printf("%s\n", name);
    fflush(stdout);
    LLVMFuzzerTestOneInput(data, size);
    free(data);
    return 0;
}

int main(int argc, char **argv)
{
    struct dirent *entry;
    DIR *d = argc == 2 ? opendir(argv[1]) : NULL;
    int failed = 0, n = 0;

    if (!d) {
        fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
        return 2;
    }
    while ((entry = readdir(d))) {
        if (entry->d_name[0] == '.')
            continue;
        failed |= replay(argv[1], entry->d_name);
        n++;
    }
    closedir(d);
    printf("%d inputs\n", n);
    return failed || n == 0;
}
