/* The router's options. */
#pragma once

#include "common/conf/conf.h"

struct dmk_router_conf {
    char *http_host;
    uint32_t http_port;
    char *admin_host;
    uint32_t admin_port; /* 0: the admin paths are served on the HTTP port */
    char *grpc_listen;   /* "" = no gRPC */
    char *vocab;
    char *model_name;
    struct dmk_conf_list model_aliases;
    struct dmk_conf_list prefill, decode;
    struct dmk_conf_list api_keys, admin_keys;
    char *api_keys_file, *admin_keys_file;
    struct dmk_conf_list allowed_origins;
    char *tls_cert, *tls_key, *tls_client_ca; /* "" = no TLS; no certificate asked of clients */
    bool admin_tls;
    char *worker_tls_ca, *worker_tls_cert, *worker_tls_key, *worker_tls_name;
    bool local_prefill;
    uint32_t max_context; /* 0 = as the decode workers say */
    char *date;
    bool recipient_in_channel, library_schema_text, library_drop_rule;

    uint32_t max_requests;
    uint32_t max_waiting;
    uint64_t max_tokens_in_flight;
    uint32_t max_choices;
    uint32_t max_connections;
    uint32_t max_grpc_calls;
    uint64_t max_header_bytes;
    uint64_t max_body_bytes;
    uint32_t max_messages, max_tools;
    uint32_t max_schema_depth;
    uint64_t max_schema_bytes;
    uint64_t max_prompt_tokens;
    uint64_t max_write_bytes;
    uint64_t index_blocks;

    uint64_t queue_timeout_ms;
    uint64_t reserve_timeout_ms;
    uint64_t prefill_timeout_ms;
    uint64_t token_timeout_ms;
    uint64_t request_timeout_ms;
    uint64_t keepalive_ms;
    uint64_t stream_gap_ms;
    uint64_t idle_timeout_ms;
    uint64_t read_timeout_ms;
    uint64_t resolve_ms;
    uint64_t worker_silence_ms;
    uint64_t hello_timeout_ms;
    uint64_t drain_settle_ms;
    uint64_t drain_limit_ms;

    uint32_t log_level; /* enum dmk_log_level */
    bool log_json;
};

extern const struct dmk_conf_program dmk_router_program;
