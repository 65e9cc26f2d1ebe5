/* Loaded before the libraries of a process (LD_PRELOAD). Its wall clock is off by the seconds in the file
   CLOCK_SHIFT (eight bytes), which may change at any time. Monotonic clocks are not changed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile long none, *shift = &none;

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("CLOCK_SHIFT");
  int file = path ? open(path, O_RDONLY) : -1;
  void *found = file < 0 ? MAP_FAILED : mmap(0, sizeof *shift, PROT_READ, MAP_SHARED, file, 0);
  if (found != MAP_FAILED) shift = found;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
  static int (*stock)(clockid_t, struct timespec *);
  if (!stock) stock = dlsym(RTLD_NEXT, "clock_gettime");
  int code = stock(clock, at);
  if (!code && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += *shift;
  return code;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
  static int (*stock)(struct timeval *, void *);
  if (!stock) stock = dlsym(RTLD_NEXT, "gettimeofday");
  int code = stock(at, zone);
  if (!code) at->tv_sec += *shift;
  return code;
}

time_t time(time_t *to) {
  struct timespec at;
  clock_gettime(CLOCK_REALTIME, &at);
  if (to) *to = at.tv_sec;
  return at.tv_sec;
}
