/* belongings.c - descriptors, threads, mappings and allocations of this process. */
#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/base.h"
#include "belongings.h"

static int entries(const char *directory)
{
    DIR *d = opendir(directory);
    int n = 0;
    while (d && readdir(d))
        n++;
    if (d)
        closedir(d);
    return n;
}

belongings belongings_now(void)
{
    belongings b = {entries("/proc/self/fd"), entries("/proc/self/task"), 0, tide_alloc_live()};
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    while (maps && fgets(line, sizeof line, maps))
        b.maps += strstr(line, "memfd:tide") != NULL;
    if (maps)
        fclose(maps);
    return b;
}

void belongings_left(const belongings *before, char text[128])
{
    for (int ms = 0; ms < 1000; ms++) {
        belongings now = belongings_now();
        struct timespec pause = {0, 1000000};
        if (now.fds <= before->fds && now.threads <= before->threads && now.maps <= before->maps &&
            now.allocations <= before->allocations) {
            text[0] = '\0';
            return;
        }
        snprintf(text, 128, "%d descriptors, %d threads, %d mappings, %lld allocations", now.fds - before->fds,
                 now.threads - before->threads, now.maps - before->maps,
                 (long long)(now.allocations - before->allocations));
        nanosleep(&pause, NULL);
    }
}
