/* sanitized.h - whether this build looks for errors of memory or threads. Its tests go every path, but not as often:
 * everything takes five to twenty times as long. */
#ifndef HARNESS_SANITIZED_H
#define HARNESS_SANITIZED_H

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

#endif
