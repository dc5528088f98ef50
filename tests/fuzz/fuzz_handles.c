/*
 * fuzz_handles.c - the handle exchange: a message with any bytes and any number of descriptors on the listening socket,
 * any card from the all-gather, any verdict of another rank. Whatever comes, no descriptor stays.
 *
 * Includes the module to get at its messages.
 */
#include "fabric/handles.c"

#include <fcntl.h>
#include <stdlib.h>

#include "fuzz.h"

enum { MAX_FDS = 4, N_RANKS = 3 };

static int open_descriptors(void)
{
    int n = 0;
    for (int fd = 0; fd < 64; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

/* Knocks with the input's bytes; with the right token in front when `known`. */
static void knock(const card *to, fuzz_input *in, bool known, int n_fds)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    union { struct cmsghdr align; char bytes[CMSG_SPACE(MAX_FDS * sizeof(int))]; } control = {0};
    char bytes[sizeof(parcel) + 16] = {0};
    size_t n = in->size < sizeof bytes ? in->size : sizeof bytes;
    struct iovec part = {bytes, n};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    HOLDS(s >= 0);
    memcpy(name.sun_path, to->name, to->name_bytes);
    HOLDS(connect(s, (struct sockaddr *)&name, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + to->name_bytes)) ==
          0);
    memcpy(bytes, in->data, n);
    if (known)
        memcpy(bytes, to->token, sizeof to->token);
    if (n_fds) {
        struct cmsghdr *header;
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE((size_t)n_fds * sizeof(int));
        header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN((size_t)n_fds * sizeof(int));
        for (int i = 0; i < n_fds; i++)
            memcpy(CMSG_DATA(header) + (size_t)i * sizeof(int), &s, sizeof s);
    }
    if (n)
        HOLDS(sendmsg(s, &message, MSG_NOSIGNAL) == (ssize_t)n);
    close(s);
}

static void take(fuzz_input *in)
{
    struct pollfd watch[N_RANKS + 1];
    uint8_t how = fuzz_byte(in);
    uint32_t from = 0;
    int64_t pid = 0;
    int fd = -1, listener = -1, before = open_descriptors(), status;
    card own = {0};

    HOLDS(listen_anywhere(&own, 1, &listener) == TIDE_OK);
    for (uint32_t i = 0; i <= N_RANKS; i++)
        watch[i] = (struct pollfd){.fd = i ? -1 : listener, .events = POLLIN};
    knock(&own, in, how & 1, how >> 1 & 3);
    status = take_parcel(watch, &own, N_RANKS, tide_now_ns() + 1000000000, &from, &fd, &pid);
    HOLDS(status == TIDE_OK ? from <= N_RANKS : tide_last_error()[0] != 0);
    HOLDS((status == TIDE_OK && from < N_RANKS) == (fd >= 0));
    if (fd >= 0)
        close(fd);
    close(listener);
    HOLDS(open_descriptors() == before);
}

static void give(fuzz_input *in)
{
    card to = {0};
    pid_t peer;
    int before = open_descriptors(), status;
    size_t n = in->size < sizeof to ? in->size : sizeof to;

    memcpy(&to, in->data, n);
    status = send_parcel(&to, 1, 0, 0, tide_now_ns() + 1000000, &peer);
    HOLDS(status != TIDE_OK && tide_last_error()[0]); /* nobody listens there */
    HOLDS(open_descriptors() == before);
}

typedef struct chatter {
    fuzz_input *in;
    uint32_t n_ranks;
} chatter;

static int any_gather(void *context, const void *in, void *out, size_t bytes)
{
    chatter *c = context;
    memcpy(out, in, bytes);
    for (size_t i = bytes; i < bytes * c->n_ranks; i++)
        ((uint8_t *)out)[i] = fuzz_byte(c->in);
    return 0;
}

static void agree(fuzz_input *in)
{
    chatter c = {in, N_RANKS};
    fab_open open = {.rank = 0, .n_ranks = N_RANKS, .node_size = 1, .allgather = any_gather, .allgather_context = &c};
    tide_error_info info;
    int status = fab_agree(&open, TIDE_OK);

    HOLDS(status == TIDE_OK || tide_last_error()[0]);
    HOLDS(tide_error_describe(status, &info) == TIDE_OK);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in = {data, size};

    switch (fuzz_byte(&in) % 3) {
    case 0:
        take(&in);
        break;
    case 1:
        give(&in);
        break;
    default:
        agree(&in);
    }
    return 0;
}
