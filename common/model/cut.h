/* What lies where in a converted folder: files for the ranks of one layout, every tensor on a page's border.
 *
 * A pure function of the model's shape, the layout and the format of the experts: who writes such a folder and
 * who reads it ask here, so they can not differ. Files are safetensors with the names of the Hugging Face layout:
 *   shared.safetensors                  embedding, norms, routers, o_proj's biases: the same for all ranks
 *   attention-tpI.safetensors           rows of q, k, v, columns of o_proj, sinks of the heads of tp index I
 *   head-tpI.safetensors                rows of the LM head of tp index I
 *   experts-rankR-layerL.safetensors    the experts of rank R in layer L
 * so groups of a layout with dp > 1 share their attention files. The format has no holes; what lies between two
 * tensors is a tensor of bytes called _pad.N, and blanks fill the header up to a page's border. */
#pragma once

#include "common/base/buf.h"
#include "common/model/safetensors.h"
#include "common/model/weights.h"

#define DMK_CUT_ALIGN  4096u
#define DMK_CUT_GLOBAL UINT32_MAX /* the layer of tensors that belong to none */

struct dmk_cut_tensor {
    char name[96];
    enum dmk_dtype dtype;
    uint32_t rank; /* number of dimensions */
    uint64_t dims[4];
    uint64_t n_bytes;
    uint64_t offset; /* in the file */
    uint32_t layer;
    size_t place; /* of the pointer in struct dmk_layer_weights, or in struct dmk_rank_weights */
    /* Along this axis it holds [begin, end) of the `of` that the model has. */
    uint32_t axis;
    uint64_t begin, end, of;
};

enum dmk_cut_kind { DMK_CUT_SHARED, DMK_CUT_ATTENTION, DMK_CUT_HEAD, DMK_CUT_EXPERTS };

struct dmk_cut_file {
    char name[64];
    enum dmk_cut_kind kind;
    uint32_t index; /* tp index, or rank of experts */
    uint32_t layer; /* of experts, else DMK_CUT_GLOBAL */
    uint32_t first, n_tensors;
    uint64_t data_start; /* bytes of the header */
    uint64_t n_bytes;    /* of the whole file */
};

struct dmk_cut {
    struct dmk_layout layout;
    enum dmk_expert_format experts; /* MXFP4 or FP8 */
    struct dmk_cut_file *files;
    uint32_t n_files;
    struct dmk_cut_tensor *tensors; /* in the order of the files, and of their data */
    uint32_t n_tensors;
    uint64_t n_bytes; /* of all files */
};

/* The layout has been checked. */
int dmk_cut_plan(const struct dmk_shape *shape, struct dmk_layout layout,
                 enum dmk_expert_format experts, struct dmk_cut *ret_cut, struct dmk_error *reterr);
void dmk_cut_free(struct dmk_cut *cut);

/* The first data_start bytes of a file. */
void dmk_cut_header(const struct dmk_cut *cut, const struct dmk_cut_file *file,
                    struct dmk_buf *out);

/* Whether rank reads the file. */
bool dmk_cut_serves(const struct dmk_cut *cut, const struct dmk_cut_file *file, uint32_t rank);

/* "mxfp4", "fp8", "bf16", and "shared", ... as manifests have them. */
const char *dmk_cut_format_name(enum dmk_expert_format format);
const char *dmk_cut_kind_name(enum dmk_cut_kind kind);
