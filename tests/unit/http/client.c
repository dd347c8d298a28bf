/* See client.h. */
#include "client.h"
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>
#include <arpa/inet.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

char answer[1 << 18];
static size_t answer_len;

int dial(uint16_t port)
{
    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_port = htons(port)};
    struct timeval limit = {.tv_sec = 30};
    const int fd = socket(AF_INET, SOCK_STREAM, 0);

    addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)), 0);
    return fd;
}

void put(int fd, const char *bytes, size_t len)
{
    while (len > 0) {
        const ssize_t n = send(fd, bytes, len, MSG_NOSIGNAL);

        assert_true(n > 0);
        bytes += n;
        len -= (size_t)n;
    }
}

void put_text(int fd, const char *text)
{
    put(fd, text, strlen(text));
}

ssize_t read_until(int fd, const char *until)
{
    ssize_t n = 1;

    answer_len = 0;
    answer[0] = 0;
    while ((!until || !strstr(answer, until)) && answer_len < sizeof(answer) - 1) {
        n = recv(fd, answer + answer_len, sizeof(answer) - 1 - answer_len, 0);
        if (n <= 0) {
            break;
        }
        answer_len += (size_t)n;
        answer[answer_len] = 0;
    }
    return n;
}

void talk(uint16_t port, const char *request)
{
    const int fd = dial(port);

    put_text(fd, request);
    assert_int_equal(read_until(fd, NULL), 0);
    close(fd);
}

void expect_status(uint16_t port, const char *request, const char *status)
{
    talk(port, request);
    if (strncmp(answer, "HTTP/1.1 ", 9) != 0 || strncmp(answer + 9, status, strlen(status)) != 0) {
        fail_msg("request:\n%s\nnot %s but:\n%s", request, status, answer);
    }
}

void assert_has(const char *part)
{
    if (!strstr(answer, part)) {
        fail_msg("no \"%s\" in:\n%s", part, answer);
    }
}

unsigned count(const char *part)
{
    unsigned n = 0;

    for (const char *p = answer; (p = strstr(p, part)); p++) {
        n++;
    }
    return n;
}
