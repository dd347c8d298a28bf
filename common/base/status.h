/* Status codes.
 *
 * Functions that can fail return int: 0 or a positive result, or a negative code, -DMK_E....
 * Each code carries a radius, the part of the world that is broken; policy reads the radius, never
 * the code. */
#pragma once

enum dmk_radius {
    DMK_RADIUS_NONE,    /* nothing is broken */
    DMK_RADIUS_REQUEST, /* this request fails, the next one is unaffected */
    DMK_RADIUS_PEER,    /* that worker or endpoint is bad: retry elsewhere */
    DMK_RADIUS_DEVICE,  /* this process's device or memory is bad: drain and exit */
};

/* X(code, value, radius, message) */
#define DMK_STATUS_MAP(X)                                                                          \
    X(EINVAL, 1, REQUEST, "invalid argument")                                                      \
    X(ENOENT, 2, REQUEST, "not found")                                                             \
    X(EFULL, 3, REQUEST, "no room left within the configured bound")                               \
    X(EAGAIN, 4, REQUEST, "not yet")                                                               \
    X(ECANCELLED, 5, REQUEST, "cancelled")                                                         \
    X(ETIMEOUT, 6, REQUEST, "deadline passed")                                                     \
    X(EFORMAT, 7, REQUEST, "malformed data")                                                       \
    X(EMISMATCH, 8, REQUEST, "the two sides do not match")                                         \
    X(ENOTSUP, 9, REQUEST, "not supported")                                                        \
    X(EPEER, 10, PEER, "peer is gone or broken")                                                   \
    X(ESTALE, 11, PEER, "older incarnation")                                                       \
    X(EIO, 12, DEVICE, "input or output failed")                                                   \
    X(ENOMEM, 13, DEVICE, "out of memory")                                                         \
    X(EDEVICE, 14, DEVICE, "device failed")                                                        \
    X(ESHUTDOWN, 15, PEER, "shutting down")

#define DMK_STATUS_ENUM(code, value, radius, message) DMK_##code = (value),
enum dmk_status { DMK_OK = 0, DMK_STATUS_MAP(DMK_STATUS_ENUM) };
#undef DMK_STATUS_ENUM

/* Both take the value as returned (negative) or the bare code. Never NULL. */
const char *dmk_status_name(int status);
const char *dmk_status_message(int status);
enum dmk_radius dmk_status_radius(int status);
