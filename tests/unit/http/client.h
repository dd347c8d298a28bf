/* A blocking HTTP client for tests: sockets, and one answer kept as text. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

extern char answer[1 << 18]; /* of the last read, NUL-terminated */

int dial(uint16_t port);
void put(int fd, const char *bytes, size_t len);
void put_text(int fd, const char *text);
/* Reads until `until` is seen, or to the end when NULL. Returns recv's last result. */
ssize_t read_until(int fd, const char *until);
/* Sends everything, reads to the end of the connection, which must come. */
void talk(uint16_t port, const char *request);
void expect_status(uint16_t port, const char *request, const char *status);
void assert_has(const char *part);
unsigned count(const char *part);
