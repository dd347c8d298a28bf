/* TLS below the connections of a server, by OpenSSL over memory: bytes of the socket go in, plain bytes come out,
 * and the other way round. Owner: the loop.
 *
 * The files are read again when they have changed, which is looked at once a second when a client connects;
 * connections that are open keep the certificate that they began with. Files that can not be used are told to
 * the log and the ones from before stay. */
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <stdlib.h>
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "common/http/internal.h"

#define LOOK_EVERY_NS DMK_NS_PER_S

enum { CERT, KEY, CA, N_FILES };

struct dmk_http__tls {
    char *paths[N_FILES]; /* NULL: not used */
    struct dmk_file_stamp stamps[N_FILES];
    SSL_CTX *ctx;
    uint64_t looked_ns; /* 0: look at the next connection */
};

static const unsigned char protocol[] = "\x08http/1.1";

static int select_protocol(SSL *ssl, const unsigned char **ret, unsigned char *ret_len,
                           const unsigned char *offered, unsigned int n_offered, void *ud)
{
    unsigned char *chosen = NULL;

    (void)ssl;
    (void)ud;
    if (SSL_select_next_proto(&chosen, ret_len, protocol, sizeof(protocol) - 1, offered,
                              n_offered) != OPENSSL_NPN_NEGOTIATED) {
        return SSL_TLSEXT_ERR_ALERT_FATAL;
    }
    *ret = chosen;
    return SSL_TLSEXT_ERR_OK;
}

/* A key with a passphrase is a failure, not a question on the terminal. */
static int no_passphrase(char *buf, int size, int writing, void *ud)
{
    (void)buf;
    (void)size;
    (void)writing;
    (void)ud;
    return 0;
}

/* Why OpenSSL failed; takes its list of reasons with it. */
static const char *reason(void)
{
    const char *text = ERR_reason_error_string(ERR_peek_last_error());

    ERR_clear_error();
    return text ? text : "no reason given";
}

static int stamp_files(struct dmk_http__tls *t, struct dmk_error *reterr)
{
    static const char *const names[N_FILES] = {"certificate", "private key", "CA certificate"};

    for (int i = 0; i < N_FILES; i++) {
        struct dmk_buf text;
        int rc = 0;

        dmk_buf_init(&text, (1u << 20) + 1);
        if (t->paths[i]) {
            rc = dmk_file_read(t->paths[i], names[i], 1u << 20, &text, &t->stamps[i], reterr);
        }
        dmk_buf_fini(&text);
        if (rc < 0) {
            return rc;
        }
    }
    return 0;
}

static int fill_ctx(const struct dmk_http__tls *t, SSL_CTX *ctx, struct dmk_error *reterr)
{
    SSL_CTX_set_default_passwd_cb(ctx, no_passphrase);
    SSL_CTX_set_min_proto_version(ctx, TLS1_2_VERSION);
    SSL_CTX_set_options(ctx, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION |
                                 SSL_OP_CIPHER_SERVER_PREFERENCE);
    SSL_CTX_set_mode(ctx, SSL_MODE_RELEASE_BUFFERS);
    SSL_CTX_set_alpn_select_cb(ctx, select_protocol, NULL);
    if (SSL_CTX_use_certificate_chain_file(ctx, t->paths[CERT]) != 1) {
        return dmk_error_set(reterr, -DMK_EFORMAT,
                             "the certificate file \"%s\" can not be used: %s", t->paths[CERT],
                             reason());
    }
    if (SSL_CTX_use_PrivateKey_file(ctx, t->paths[KEY], SSL_FILETYPE_PEM) != 1 ||
        SSL_CTX_check_private_key(ctx) != 1) {
        return dmk_error_set(reterr, -DMK_EFORMAT,
                             "the private key file \"%s\" can not be used with \"%s\": %s",
                             t->paths[KEY], t->paths[CERT], reason());
    }
    if (t->paths[CA]) {
        STACK_OF(X509_NAME) *const cas = SSL_load_client_CA_file(t->paths[CA]);

        if (!cas || SSL_CTX_load_verify_locations(ctx, t->paths[CA], NULL) != 1) {
            sk_X509_NAME_pop_free(cas, X509_NAME_free);
            return dmk_error_set(reterr, -DMK_EFORMAT,
                                 "the CA certificate file \"%s\" can not be used: %s", t->paths[CA],
                                 reason());
        }
        SSL_CTX_set_client_CA_list(ctx, cas);
        SSL_CTX_set_verify(ctx, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, NULL);
        (void)SSL_CTX_set_session_id_context(ctx, protocol, sizeof(protocol) - 1);
    }
    return 0;
}

/* Reads the files; what was in use before stays on a failure. */
static int load(struct dmk_http__tls *t, struct dmk_error *reterr)
{
    SSL_CTX *ctx;
    int rc = stamp_files(t, reterr); /* first: what changes meanwhile is seen at the next look */

    if (rc < 0) {
        return rc;
    }
    ctx = SSL_CTX_new(TLS_server_method());
    dmk_assert(ctx);
    rc = fill_ctx(t, ctx, reterr);
    if (rc < 0) {
        SSL_CTX_free(ctx);
        return rc;
    }
    SSL_CTX_free(t->ctx); /* lives on in its connections */
    t->ctx = ctx;
    return 0;
}

static char *copy_path(const char *text)
{
    char *copy = text && text[0] ? strdup(text) : NULL;

    dmk_assert(copy || !text || !text[0]);
    return copy;
}

int dmk_http__tls_new(const struct dmk_http_conf *conf, struct dmk_http__tls **ret,
                      struct dmk_error *reterr)
{
    struct dmk_http__tls *t = calloc(1, sizeof(*t));
    int rc;

    dmk_assert(t);
    t->paths[CERT] = copy_path(conf->tls_cert);
    t->paths[KEY] = copy_path(conf->tls_key);
    t->paths[CA] = copy_path(conf->tls_client_ca);
    if (!t->paths[CERT] || !t->paths[KEY]) {
        rc = dmk_error_set(reterr, -DMK_EINVAL,
                           "TLS needs a certificate and its private key, not one of them");
    } else {
        rc = load(t, reterr);
    }
    if (rc < 0) {
        dmk_http__tls_free(&t);
        return rc;
    }
    *ret = t;
    return 0;
}

void dmk_http__tls_free(struct dmk_http__tls **tls)
{
    struct dmk_http__tls *t = *tls;

    if (t) {
        SSL_CTX_free(t->ctx);
        for (int i = 0; i < N_FILES; i++) {
            free(t->paths[i]);
        }
        free(t);
        *tls = NULL;
    }
}

void dmk_http__tls_reload(struct dmk_http__tls *t)
{
    struct dmk_error error;

    if (load(t, &error) < 0) {
        dmk_log_error("TLS of HTTP: %s; the certificate from before stays", error.text);
    } else {
        dmk_log_info("TLS of HTTP: the certificate \"%s\" was read again", t->paths[CERT]);
    }
}

static void look_at_files(struct dmk_http__tls *t)
{
    const uint64_t now = dmk_clock_ns();

    if (now - t->looked_ns < LOOK_EVERY_NS) {
        return;
    }
    t->looked_ns = now;
    for (int i = 0; i < N_FILES; i++) {
        if (t->paths[i] && dmk_file_changed(t->paths[i], &t->stamps[i])) {
            dmk_http__tls_reload(t);
            return;
        }
    }
}

/* ---- connections ---- */

void dmk_http__tls_open(struct dmk_http__conn *conn)
{
    struct dmk_http__tls *t = conn->server->tls;
    BIO *in, *out;

    look_at_files(t);
    conn->ssl = SSL_new(t->ctx);
    in = BIO_new(BIO_s_mem());
    out = BIO_new(BIO_s_mem());
    dmk_assert(conn->ssl && in && out);
    SSL_set_bio(conn->ssl, in, out); /* they go with it */
    SSL_set_accept_state(conn->ssl);
}

void dmk_http__tls_close(struct dmk_http__conn *conn)
{
    SSL_free(conn->ssl);
    conn->ssl = NULL;
}

void dmk_http__tls_feed(struct dmk_http__conn *conn, const char *data, size_t len)
{
    dmk_assert(BIO_write(SSL_get_rbio(conn->ssl), data, (int)len) == (int)len);
}

bool dmk_http__tls_has_output(const struct dmk_http__conn *conn)
{
    return BIO_pending(SSL_get_wbio(conn->ssl)) > 0;
}

/* What went wrong, for people; a client that speaks HTTP without TLS is the usual mistake. */
static void tell_failure(struct dmk_http__conn *conn)
{
    const unsigned long code = ERR_peek_last_error();
    const bool plain =
        ERR_GET_LIB(code) == ERR_LIB_SSL && (ERR_GET_REASON(code) == SSL_R_HTTP_REQUEST ||
                                             ERR_GET_REASON(code) == SSL_R_HTTPS_PROXY_REQUEST ||
                                             ERR_GET_REASON(code) == SSL_R_WRONG_VERSION_NUMBER);

    dmk_http__tell_peer(conn, plain ? "it does not speak TLS, which this port does"
                                    : "its TLS handshake failed");
    dmk_log_debug("TLS of HTTP: %s: %s", conn->peer, reason());
}

int64_t dmk_http__tls_read(struct dmk_http__conn *conn, char *to, size_t room)
{
    int n, error;

    ERR_clear_error();
    n = SSL_read(conn->ssl, to, (int)room);
    if (!conn->tls_ready && SSL_is_init_finished(conn->ssl)) {
        conn->tls_ready = true;
        dmk_http__conn_state(conn, DMK_HTTP__IDLE);
    }
    if (n > 0) {
        return n;
    }
    error = SSL_get_error(conn->ssl, n);
    if (error == SSL_ERROR_WANT_READ) {
        return 0;
    }
    if (error != SSL_ERROR_ZERO_RETURN && !conn->tls_ready) {
        tell_failure(conn);
    }
    ERR_clear_error();
    return error == SSL_ERROR_ZERO_RETURN ? UV_EOF : UV_EPROTO;
}

bool dmk_http__tls_seal(struct dmk_http__conn *conn, struct dmk_buf *plain, struct dmk_buf *out)
{
    char chunk[16384];
    int n;

    ERR_clear_error();
    if (plain->len > 0) {
        if (plain->len > INT32_MAX ||
            SSL_write(conn->ssl, plain->data, (int)plain->len) != (int)plain->len) {
            ERR_clear_error();
            return false;
        }
        dmk_buf_reset(plain);
    }
    while ((n = BIO_read(SSL_get_wbio(conn->ssl), chunk, sizeof(chunk))) > 0) {
        dmk_buf_append(out, chunk, (size_t)n);
    }
    return !out->failed;
}

void dmk_http__tls_bye(struct dmk_http__conn *conn)
{
    ERR_clear_error();
    if (conn->tls_ready) {
        (void)SSL_shutdown(conn->ssl); /* the peer's own bye is not waited for */
    }
    ERR_clear_error();
}
