/* A library for LD_PRELOAD: the wall clock of a process differs from the system's clock by the seconds in a file.

   RELAX_CLOCK_OFFSET names the file, with text such as -86400. The monotonic clock and relative sleeps do not change, as
   when an administrator or NTP sets the clock. Waits until a wall-clock time end at that time of the false clock.
   Debian's libfaketime 0.9.10 cannot do this: if it leaves the monotonic clock alone, each clock_nanosleep until an
   absolute monotonic time, which is Python's time.sleep, fails with EINVAL. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define AGE_NS 500000000L  /* the file is read again after half a second */
#define WALL_CLOCK_S 1000000000L  /* an absolute time above this is of the wall clock; no machine has run for 31 years */

static int real_time(clockid_t clock, struct timespec *now) { return (int)syscall(SYS_clock_gettime, clock, now); }

static time_t offset(void) {
  static long checked_ns = -AGE_NS, seconds = 0;
  struct timespec now;
  real_time(CLOCK_MONOTONIC, &now);
  long now_ns = now.tv_sec * 1000000000L + now.tv_nsec;
  if (now_ns - __atomic_load_n(&checked_ns, __ATOMIC_RELAXED) < AGE_NS) return __atomic_load_n(&seconds, __ATOMIC_RELAXED);
  __atomic_store_n(&checked_ns, now_ns, __ATOMIC_RELAXED);
  const char *path = getenv("RELAX_CLOCK_OFFSET");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file >= 0) {
    char text[32] = {0};
    if (read(file, text, sizeof text - 1) > 0) __atomic_store_n(&seconds, strtol(text, NULL, 10), __ATOMIC_RELAXED);
    close(file);
  }
  return __atomic_load_n(&seconds, __ATOMIC_RELAXED);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int code = real_time(clock, now);
  if (code == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset();
  return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec exact;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *now) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (now) *now = exact.tv_sec;
  return exact.tv_sec;
}

/* Returns the time of the system's clock at which a wait until ``until`` ends. */
static struct timespec system_time(const struct timespec *until) {
  struct timespec moved = *until;
  if (moved.tv_sec > WALL_CLOCK_S) moved.tv_sec -= offset();
  return moved;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
  static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
  if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  struct timespec moved = system_time(until);
  return real(condition, mutex, &moved);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
  static int (*real)(sem_t *, const struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "sem_timedwait");
  struct timespec moved = system_time(until);
  return real(semaphore, &moved);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
  static int (*real)(pthread_mutex_t *, const struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
  struct timespec moved = system_time(until);
  return real(mutex, &moved);
}
