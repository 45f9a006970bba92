/* Preloaded, this turns the wall clock by the number of seconds in the file $JUMP_FILE. All other clocks stay right. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long off(void)
{
    char text[32] = {0};
    const char *path = getenv("JUMP_FILE");
    int file = path ? syscall(SYS_openat, AT_FDCWD, path, O_RDONLY, 0) : -1;
    if (file < 0)
        return 0;
    syscall(SYS_read, file, text, sizeof text - 1);
    syscall(SYS_close, file);
    return atol(text);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && clock == CLOCK_REALTIME)
        now->tv_sec += off();
    return failed;
}

int gettimeofday(struct timeval *now, void *zone)
{
    struct timespec exact;
    int failed = clock_gettime(CLOCK_REALTIME, &exact);
    if (now) {
        now->tv_sec = exact.tv_sec;
        now->tv_usec = exact.tv_nsec / 1000;
    }
    return failed;
}

time_t time(time_t *to)
{
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (to)
        *to = exact.tv_sec;
    return exact.tv_sec;
}
