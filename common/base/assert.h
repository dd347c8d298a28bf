/* Assertions for programmer errors only; they stay on in production (a crash beats a wrong answer).
 * Input from outside is checked and answered, never asserted. */
#pragma once

_Noreturn void dmk_assert_fail(const char *file, int line, const char *what);

#define dmk_assert(cond)                                                                           \
    do {                                                                                           \
        if (__builtin_expect(!(cond), 0)) {                                                        \
            dmk_assert_fail(__FILE__, __LINE__, #cond);                                            \
        }                                                                                          \
    } while (0)

#define dmk_unreachable(what) dmk_assert_fail(__FILE__, __LINE__, "unreachable: " what)
