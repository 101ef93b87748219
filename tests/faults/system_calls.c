/* Stands before libc in ranks of a test: one counted call below a folder fails, and the wall clock jumps.

   CALL_NAME    write, fsync or rename        CALL_UNDER   a part of the path it must have
   CALL_NTH     which of these calls, from 1  CALL_HOW     short, half (half is written, then the error) or error
   CALL_ERRNO   the error's number            CALL_FIRED   a file that is made when it happens
   CLOCK_JUMPS  "200:3600 400:-86400": from the 200th look at the clock an hour later, from the 400th a day earlier */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static atomic_long calls, looks;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int is_due(const char *name, const char *path) {
    const char *wanted = getenv("CALL_NAME"), *under = getenv("CALL_UNDER");
    if (!wanted || !under || strcmp(wanted, name) || !strstr(path, under)) return 0;
    if (atomic_fetch_add(&calls, 1) + 1 != atol(getenv("CALL_NTH"))) return 0;
    int fired = open(getenv("CALL_FIRED"), O_WRONLY | O_CREAT, 0600);
    if (fired >= 0) {
        REAL(write)(fired, path, strlen(path));
        close(fired);
    }
    return 1;
}

static int is_due_for(const char *name, int descriptor) {
    char link[64], path[4096];
    if (!getenv("CALL_NAME") || strcmp(getenv("CALL_NAME"), name)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_due(name, path);
}

static int fail(void) {
    errno = atoi(getenv("CALL_ERRNO"));
    return -1;
}

ssize_t write(int descriptor, const void *data, size_t size) {
    if (is_due_for("write", descriptor)) {
        const char *how = getenv("CALL_HOW");
        if (!strcmp(how, "error")) return fail();
        ssize_t done = REAL(write)(descriptor, data, size / 2);
        return strcmp(how, "half") ? done : fail();
    }
    return REAL(write)(descriptor, data, size);
}

int fsync(int descriptor) { return is_due_for("fsync", descriptor) ? fail() : REAL(fsync)(descriptor); }

int rename(const char *from, const char *to) { return is_due("rename", from) ? fail() : REAL(rename)(from, to); }

/* Seconds that the wall clock is off. */
static long jump(void) {
    const char *jumps = getenv("CLOCK_JUMPS");
    if (!jumps) return 0;
    long look = atomic_fetch_add(&looks, 1) + 1, off = 0, from, by;
    for (int read; sscanf(jumps, " %ld:%ld%n", &from, &by, &read) == 2; jumps += read)
        if (look >= from) off = by;
    return off;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = REAL(clock_gettime)(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += jump();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int result = REAL(gettimeofday)(now, zone);
    now->tv_sec += jump();
    return result;
}

time_t time(time_t *where) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where) *where = now.tv_sec;
    return now.tv_sec;
}
