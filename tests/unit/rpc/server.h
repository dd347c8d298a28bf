/* Methods of a test server, used inside the test program and as a process of its own.
 *
 *   /test.Test/Echo      each message back; at the client's end: OK "bye"
 *   /test.Test/Hold      nothing, ever
 *   /test.Test/Fail      at the first message: NOT_FOUND "no such thing: <message>"
 *   /test.Test/Burst     the first message is a decimal n: n numbered messages in one turn, then OK
 *   /test.Test/Flood     1 MiB messages without end, as long as the queue takes them
 *   /test.Test/Drop      cancels at the first message
 *   /test.Test/Metadata  the value of x-test, or "none"
 *   /damask.v1.Worker/Connect  hello for hello; a Generate is failed when its check fails, else answered
 *                              by Tokens with the prompt's first ids and Finished */
#pragma once

#include "common/rpc/rpc.h"

struct test_server_stats {
    int n_open, n_closed, n_ended;
    int last_code;       /* of on_closed */
    int last_send_error; /* of Flood */
    struct dmk_rpc_stream *last;
};
extern struct test_server_stats test_stats;

int test_server_new(struct dmk_loop *loop, struct dmk_rpc *rpc, const char *listen,
                    uint32_t max_streams, struct dmk_rpc_server **ret, struct dmk_error *reterr);
