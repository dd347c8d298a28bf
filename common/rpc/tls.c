/* TLS for servers and channels: PEM files to gRPC's credentials, and who the other side is.
 *
 * A server asks for its certificate at each handshake, on a thread of gRPC's and never twice at a time for one
 * port; it gets fresh ones when a file has changed. Whatever is wrong with them then is told to the log, and
 * the ones from before stay in use. A channel reads its files when it is made. */
#include <grpc/grpc_security.h>
#include <stdlib.h>
#include "common/base/file.h"
#include "common/base/log.h"
#include "common/rpc/internal.h"

#define MAX_PEM_BYTES (1u << 20)

enum { CERT, KEY, CA, N_FILES };

static const char *const names[N_FILES] = {"certificate", "private key", "CA certificate"};

struct pem {
    struct dmk_buf text[N_FILES];
    struct dmk_file_stamp stamps[N_FILES];
};

struct dmk_rpc__tls {
    char *paths[N_FILES]; /* NULL: not used */
    char *name;           /* of the client's certificate; NULL: any */
    struct pem pem;       /* what is in use; read for the first handshake already */
    bool given;           /* gRPC has had it */
};

static char *copy_path(const char *text)
{
    char *copy;

    if (!text || !text[0]) {
        return NULL;
    }
    copy = strdup(text);
    dmk_assert(copy);
    return copy;
}

static void free_pem(struct pem *pem)
{
    for (int i = 0; i < N_FILES; i++) {
        dmk_buf_fini(&pem->text[i]);
    }
}

static int read_pem(char *const paths[N_FILES], struct pem *ret, struct dmk_error *reterr)
{
    struct pem pem = {0};

    for (int i = 0; i < N_FILES; i++) {
        int rc;

        dmk_buf_init(&pem.text[i], MAX_PEM_BYTES + 1);
        if (!paths[i]) {
            continue;
        }
        rc = dmk_file_read(paths[i], names[i], MAX_PEM_BYTES, &pem.text[i], &pem.stamps[i], reterr);
        if (rc == 0 && (pem.text[i].len == 0 || !strstr(pem.text[i].data, "-----BEGIN "))) {
            rc = dmk_error_set(reterr, -DMK_EFORMAT, "the %s file \"%s\" holds nothing in PEM form",
                               names[i], paths[i]);
        }
        if (rc < 0) {
            free_pem(&pem);
            return rc;
        }
    }
    *ret = pem;
    return 0;
}

void dmk_rpc__tls_free(struct dmk_rpc__tls **tls)
{
    struct dmk_rpc__tls *t = *tls;

    if (!t) {
        return;
    }
    for (int i = 0; i < N_FILES; i++) {
        free(t->paths[i]);
    }
    free(t->name);
    free_pem(&t->pem);
    free(t);
    *tls = NULL;
}

static int new_tls(const struct dmk_rpc_tls *conf, struct dmk_rpc__tls **ret,
                   struct dmk_error *reterr)
{
    struct dmk_rpc__tls *t = calloc(1, sizeof(*t));
    int rc;

    dmk_assert(t);
    t->paths[CERT] = copy_path(conf->cert);
    t->paths[KEY] = copy_path(conf->key);
    t->paths[CA] = copy_path(conf->ca);
    t->name = copy_path(conf->name);
    if (!t->paths[CERT] != !t->paths[KEY]) {
        rc = dmk_error_set(reterr, -DMK_EINVAL, "TLS needs the certificate and its key, not one");
    } else {
        rc = read_pem(t->paths, &t->pem, reterr);
    }
    if (rc < 0) {
        dmk_rpc__tls_free(&t);
        return rc;
    }
    *ret = t;
    return 0;
}

/* ---- servers ---- */

static bool has_changed(const struct dmk_rpc__tls *t)
{
    for (int i = 0; i < N_FILES; i++) {
        if (t->paths[i] && dmk_file_changed(t->paths[i], &t->pem.stamps[i])) {
            return true;
        }
    }
    return false;
}

static grpc_ssl_certificate_config_reload_status
fetch(void *ud, grpc_ssl_server_certificate_config **ret_config)
{
    struct dmk_rpc__tls *t = ud;
    grpc_ssl_pem_key_cert_pair pair;
    struct dmk_error error;
    struct pem pem;

    if (t->given) {
        if (!has_changed(t)) {
            return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
        }
        if (read_pem(t->paths, &pem, &error) < 0) {
            dmk_log_error("TLS of gRPC: %s; the certificate from before stays", error.text);
            return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_FAIL;
        }
        free_pem(&t->pem);
        t->pem = pem;
        dmk_log_info("TLS of gRPC: the certificate \"%s\" was read again", t->paths[CERT]);
    }
    t->given = true;
    pair = (grpc_ssl_pem_key_cert_pair){.private_key = t->pem.text[KEY].data,
                                        .cert_chain = t->pem.text[CERT].data};
    /* gRPC wants a list of CAs even where no certificate is asked for: any valid one does then. */
    *ret_config = grpc_ssl_server_certificate_config_create(
        t->pem.text[t->paths[CA] ? CA : CERT].data, &pair, 1);
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
}

int dmk_rpc__tls_server(const struct dmk_rpc_tls *conf, struct dmk_rpc__tls **ret,
                        grpc_server_credentials **ret_creds, struct dmk_error *reterr)
{
    int rc;

    if (!conf->cert || !conf->cert[0]) {
        return dmk_error_set(reterr, -DMK_EINVAL, "TLS of a gRPC server needs a certificate");
    }
    rc = new_tls(conf, ret, reterr);
    if (rc == 0) {
        *ret_creds = grpc_ssl_server_credentials_create_with_options(
            grpc_ssl_server_credentials_create_options_using_config_fetcher(
                (*ret)->paths[CA] ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                                  : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE,
                fetch, *ret));
    }
    return rc;
}

static bool has_property(const grpc_auth_context *context, const char *key, const char *value)
{
    grpc_auth_property_iterator it = grpc_auth_context_find_properties_by_name(context, key);
    const grpc_auth_property *p;

    while ((p = grpc_auth_property_iterator_next(&it))) {
        if (p->value_length == strlen(value) && memcmp(p->value, value, p->value_length) == 0) {
            return true;
        }
    }
    return false;
}

bool dmk_rpc__tls_is_client(const struct dmk_rpc__tls *tls, grpc_call *call)
{
    grpc_auth_context *context;
    bool ok;

    if (!tls || !tls->name) {
        return true; /* gRPC has checked the chain where there is one to check */
    }
    context = grpc_call_auth_context(call);
    ok = has_property(context, GRPC_X509_SAN_PROPERTY_NAME, tls->name);
    grpc_auth_context_release(context);
    return ok;
}

/* ---- channels ---- */

int dmk_rpc__tls_channel(const struct dmk_rpc_tls *conf, grpc_channel_credentials **ret_creds,
                         struct dmk_error *reterr)
{
    grpc_ssl_pem_key_cert_pair pair;
    struct dmk_rpc__tls *t;
    const int rc = new_tls(conf, &t, reterr);

    if (rc < 0) {
        return rc;
    }
    pair = (grpc_ssl_pem_key_cert_pair){.private_key = t->pem.text[KEY].data,
                                        .cert_chain = t->pem.text[CERT].data};
    *ret_creds = grpc_ssl_credentials_create(t->paths[CA] ? t->pem.text[CA].data : NULL,
                                             t->paths[CERT] ? &pair : NULL, NULL, NULL);
    dmk_rpc__tls_free(&t);
    return *ret_creds ? 0
                      : dmk_error_set(reterr, -DMK_EFORMAT,
                                      "the certificate \"%s\" and its key can not be used",
                                      conf->cert ? conf->cert : "");
}
