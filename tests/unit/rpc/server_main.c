/* The test server as a process: prints its port, serves until SIGTERM; SIGUSR1 turns serving off, SIGUSR2
 * on. Arguments: address, keep-alive interval and time-out in ms. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include "server.h"

static struct dmk_rpc_server *server;

static void on_term(void *ud)
{
    dmk_loop_stop(ud);
}

static void on_usr(void *ud)
{
    dmk_rpc_server_set_serving(server, ud != NULL);
}

int main(int argc, char **argv)
{
    struct dmk_signal *signals[3];
    struct dmk_loop *loop;
    struct dmk_rpc *rpc;
    struct dmk_error err;
    sigset_t set;

    /* gRPC's threads are not to be given the signals: ThreadSanitizer would hold one back in a thread that
     * sleeps in a system call it does not know. They are made here and inherit the mask. */
    (void)sigemptyset(&set);
    (void)sigaddset(&set, SIGTERM);
    (void)sigaddset(&set, SIGUSR1);
    (void)sigaddset(&set, SIGUSR2);
    (void)pthread_sigmask(SIG_BLOCK, &set, NULL);
    if (dmk_loop_new(&loop, &err) < 0 || dmk_rpc_new(loop, &rpc, &err) < 0) {
        return 1;
    }
    if (argc > 3) {
        dmk_rpc_set_keepalive(rpc, (uint32_t)strtoul(argv[2], NULL, 10),
                              (uint32_t)strtoul(argv[3], NULL, 10));
    }
    if (test_server_new(loop, rpc, argc > 1 ? argv[1] : "127.0.0.1:0", 100, &server, &err) < 0) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    dmk_rpc_server_set_serving(server, true);
    signals[0] = dmk_signal_new(loop, SIGTERM, on_term, loop);
    signals[1] = dmk_signal_new(loop, SIGUSR1, on_usr, NULL);
    signals[2] = dmk_signal_new(loop, SIGUSR2, on_usr, loop);
    (void)pthread_sigmask(SIG_UNBLOCK, &set, NULL);
    printf("%u\n", dmk_rpc_server_port(server));
    fflush(stdout);
    dmk_loop_run(loop);
    dmk_rpc_server_free(&server);
    for (int i = 0; i < 3; i++) {
        dmk_signal_free(&signals[i]);
    }
    dmk_rpc_free(&rpc);
    dmk_loop_free(&loop);
    printf("opened %d closed %d\n", test_stats.n_open, test_stats.n_closed);
    return test_stats.n_open == test_stats.n_closed ? 0 : 1;
}
