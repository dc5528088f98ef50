/*
 * fabric.h - what a command that runs ranks has to know of a fabric: how a communicator asks for it, and how test data
 * gets into its memory and out again. One row a fabric in fabric.c; --fabric picks one.
 */
#ifndef TIDE_CLI_FABRIC_H
#define TIDE_CLI_FABRIC_H

#include "cli/cli.h"

typedef struct cli_fabric cli_fabric;

/* One rank's device. */
typedef struct cli_device {
    const cli_fabric *fabric;
    int gpus;       /* how many to spread ranks over; 0: all there are */
    uint32_t local; /* ranks a node */
    int ordinal;  /* for tide_comm_desc */
    void *stream; /* for every call of the library */
    void *own;    /* the fabric's */
} cli_device;

/* What a fabric can do by a seed to make a run hard; nothing of it may show in the bytes. */
typedef struct cli_trouble {
    uint64_t seed;
    bool shuffle_streams;   /* the next stream to run is drawn among those that can */
    uint32_t rail_delay_us; /* each message of a rail waits up to this much, so that contexts overtake each other */
} cli_trouble;

/* Device time of what a stream is given. The verbs that can fail return as those below. */
typedef struct cli_timer {
    int (*devices)(cli_device *d);
    int (*sms)(cli_device *d); /* streaming multiprocessors of d's */
    /* A gate that ranks of one process are held by, until d is closed. */
    int (*gate)(cli_device *d, void **gate);
    /* Nothing that d->stream is given from here on runs before the gate is open for this turn (1, 2, ...; for 0 it is), when
     * the clock starts. */
    int (*begin)(cli_device *d, void *gate, uint32_t turn);
    void (*open)(void *gate, uint32_t turn); /* for all ranks' streams */
    int (*end)(cli_device *d, double *seconds); /* waits for all that d->stream was given, and stops the clock behind it */
    int (*copy)(cli_device *d, void *to, const void *from, size_t bytes); /* within the device */
} cli_timer;

/* The verbs that can fail return a TIDE_ERR code whose text is the library's last error. All are called in the rank's
 * thread. */
struct cli_fabric {
    const char *name;
    int number;           /* tide_fabric */
    bool shared_landing;  /* multicast is a landing that the node shares; else a switch's, which a user has to ask for */
    bool nodes_apart;     /* where GPUs are fewer than ranks, nodes get one each rather than the ranks of a node */
    int (*open)(cli_device *d, uint32_t rank, uint32_t n_ranks); /* before the communicator; fills ordinal and stream */
    void (*close)(cli_device *d);                                /* after it */
    /* Memory that calls read inputs from and write outputs to, at least 64-byte aligned; NULL when there is none. */
    void *(*alloc)(cli_device *d, size_t bytes);
    void (*release)(cli_device *d, void *p); /* behind all that d->stream does; NULL is fine */
    /* Host bytes into device memory and back, behind all that d->stream waits for; done when they return. */
    int (*copy_in)(cli_device *d, void *to, const void *host, size_t bytes);
    int (*copy_out)(cli_device *d, void *host, const void *from, size_t bytes);
    int (*finish)(cli_device *d); /* returns when all that d->stream was given is done */
    void (*trouble)(tide_comm *comm, const cli_trouble *t); /* before groups are created; NULL: none to be had */
    /* Keeps what is slow to start (on), until it is let go (off); NULL: nothing is. */
    void (*keep)(bool on);
    /* Whether ranks of this topology can be threads of one process; NULL: any. */
    bool (*fits)(const tide_topology *t, int gpus);
    const cli_timer *timer; /* NULL: calls are done when tide_wait returns, by the host's clock */
};

extern const cli_fabric cli_fabrics[]; /* the first one is the reference */
extern const size_t cli_n_fabrics;
const cli_fabric *cli_find_fabric(const char *name); /* NULL when there is none */
int cli_fail_fabric(const cli *c); /* c->fabric is none: says which ones there are; CLI_BAD */

#endif
