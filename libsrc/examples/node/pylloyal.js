'use strict';
// What of pylloyal.h this program uses, through koffi. The sizes of all structs are held to the library's own account.
const koffi = require('koffi');

const ABI_VERSION = 1;
const PARSE_SPECIAL = 2;
const PART_TEXT = 0;
const PART_IMAGE = 2;
const FINISH_EOG = 1;
const E_CONTEXT = -15;

for (const name of ['pyl_model', 'pyl_store', 'pyl_projector', 'pyl_prompt', 'pyl_text']) koffi.opaque(name);
koffi.alias('pyl_branch', 'uint64_t');

const STRUCTS = {
    pyl_error: { code: 'int32_t', state: 'int32_t', engine_rc: 'int32_t', partial: 'int32_t', index: 'int32_t', need: 'int64_t', have: 'int64_t', message: 'const char *' },
    pyl_live: { models: 'uint32_t', weights: 'uint32_t', stores: 'uint32_t', contexts: 'uint32_t', branches: 'uint32_t', grammars: 'uint32_t', texts: 'uint32_t', embedders: 'uint32_t',
                projectors: 'uint32_t', prompts: 'uint32_t' },
    pyl_store_params: { n_ctx: 'uint32_t', n_batch: 'uint32_t', n_branches: 'uint32_t', n_threads: 'uint32_t', flash_attn: 'int32_t', type_k: 'int32_t', type_v: 'int32_t', swa_full: 'int32_t',
                        deterministic: 'int32_t', n_ubatch: 'uint32_t', n_rs_seq: 'uint32_t', n_outputs: 'uint32_t', kv_unified: 'int32_t', offload_kqv: 'int32_t', op_offload: 'int32_t' },
    pyl_pressure: { n_ctx: 'uint32_t', n_batch: 'uint32_t', n_threads: 'uint32_t', cells_used: 'uint32_t', cells_remaining: 'uint32_t' }, // an older caller's: as far as it is needed
    pyl_sampling: { temperature: 'float', top_k: 'int32_t', top_p: 'float', min_p: 'float', typical_p: 'float', penalty_repeat: 'float', penalty_frequency: 'float', penalty_presence: 'float',
                    penalty_last_n: 'int32_t', seed_mode: 'int32_t', seed: 'uint64_t', ignore_eog: 'int32_t' },
    pyl_run: { n_tokens: 'uint32_t', branch: 'pyl_branch', tokens: 'int32_t *', n_landed: 'uint32_t', state: 'int32_t' },
    pyl_lane: { finish: 'int32_t', branch: 'pyl_branch', max_tokens: 'uint32_t', n_tokens: 'uint32_t', final_token: 'int32_t', state: 'int32_t' },
    pyl_tick: { n_steps: 'uint32_t', stop_tokens: 'int32_t *', n_stop_tokens: 'size_t', n_ticks: 'uint32_t', n_dispatches: 'uint32_t', out_of_cells: 'int32_t', max_run_tokens: 'uint32_t' },
    pyl_projector_params: { n_threads: 'uint32_t', use_gpu: 'int32_t', flash_attn: 'int32_t', image_min_tokens: 'uint32_t', image_max_tokens: 'uint32_t', cache_bytes: 'uint64_t' },
    pyl_part: { kind: 'int32_t', text: 'const char *', tokens: 'int32_t *', rgb: 'uint8_t *', samples: 'float *', n: 'size_t', flags: 'uint32_t', width: 'uint32_t', height: 'uint32_t',
                is_frame: 'int32_t', n_pos: 'int32_t', is_non_causal: 'int32_t', id: 'const char *' },
    pyl_quote: { n_segments: 'uint32_t', n_cells: 'uint32_t', n_pos: 'uint32_t', n_media: 'uint32_t', max_rows: 'uint32_t', is_decodable: 'int32_t' },
    pyl_item: { code: 'int32_t', branch: 'pyl_branch', prompt: 'pyl_prompt *', message: 'pyl_text *', n_segments_landed: 'uint32_t', n_cells_landed: 'uint32_t', state: 'int32_t', engine_rc: 'int32_t' },
};
const types = {};
for (const [name, fields] of Object.entries(STRUCTS)) types[name] = koffi.struct(name, { struct_size: 'uint32_t', ...fields });

/** A struct of the ABI: zeros, but for its size and what is given. */
function make(name, fields = {}) {
    const out = { struct_size: koffi.sizeof(types[name]) };
    for (const [field, type] of Object.entries(STRUCTS[name])) out[field] = type.endsWith('*') ? null : 0;
    return Object.assign(out, fields);
}

/** Loads the library; every function that returns a status throws what failed. */
function load(path) {
    const lib = koffi.load(path);
    const raw = (prototype) => lib.func(prototype);
    const version = raw('int32_t pyl_abi_version()')();
    if (version !== ABI_VERSION) throw new Error(`the library speaks ABI version ${version}, this program ${ABI_VERSION}`);
    const last = raw('pyl_error * pyl_error_last()');
    const check = (code) => {
        if (code === 0) return;
        const e = koffi.decode(last(), types.pyl_error);
        throw Object.assign(new Error(e.message), { code: e.code, state: e.state, need: Number(e.need), have: Number(e.have) });
    };
    const status = (prototype) => {
        const f = raw(`int32_t ${prototype}`);
        return (...args) => check(f(...args));
    };
    const data = raw('void * pyl_text_data(const pyl_text * text)');
    const size = raw('size_t pyl_text_size(const pyl_text * text)');
    const free = raw('void pyl_text_free(pyl_text * text)');
    const take = (text) => {
        try {
            return Buffer.from(koffi.decode(data(text), 'uint8_t', Number(size(text)))).toString('utf8');
        } finally {
            free(text);
        }
    };
    const abi = {
        take, free,
        layout: status('pyl_abi_layout(_Out_ pyl_text ** out)'),
        live: status('pyl_live_objects(_Inout_ pyl_live * out)'),
        modelOpen: status('pyl_model_open(_Out_ pyl_model ** out, const char * path, size_t n_path, const void * params)'),
        modelFree: status('pyl_model_free(pyl_model * model)'),
        tokenize: status('pyl_tokenize(const pyl_model * model, const char * text, size_t n_text, uint32_t flags, int32_t * tokens, size_t capacity, _Out_ size_t * n_tokens)'),
        detokenize: status('pyl_detokenize(const pyl_model * model, const int32_t * tokens, size_t n_tokens, uint32_t flags, _Out_ pyl_text ** out)'),
        storeParamsInit: raw('void pyl_store_params_init(_Inout_ pyl_store_params * params, uint32_t struct_size)'),
        storeOpen: status('pyl_store_open(_Out_ pyl_store ** out, const pyl_model * model, const pyl_store_params * params)'),
        storeFree: status('pyl_store_free(pyl_store * store)'),
        pressure: status('pyl_store_pressure(const pyl_store * store, _Inout_ pyl_pressure * out)'),
        dryRun: status('pyl_dry_run(_Out_ pyl_text ** out, const char * path, size_t n_path, const void * model, const pyl_store_params * store)'),
        samplingInit: raw('void pyl_sampling_init(_Inout_ pyl_sampling * sampling, uint32_t struct_size)'),
        setSampling: status('pyl_branch_set_sampling(pyl_store * store, pyl_branch branch, const pyl_sampling * sampling)'),
        create: status('pyl_branch_create(pyl_store * store, _Out_ pyl_branch * out, int32_t start_pos, const pyl_sampling * sampling, const void * grammar)'),
        fork: status('pyl_branch_fork_n(pyl_store * store, pyl_branch source, pyl_branch * out, size_t n, const uint64_t * seeds, uint32_t flags)'),
        prune: status('pyl_branch_prune_subtree(pyl_store * store, pyl_branch branch)'),
        prefill: status('pyl_prefill_n(pyl_store * store, _Inout_ pyl_run * runs, size_t n_runs, uint32_t max_dispatches, void * n_dispatches)'),
        tick: status('pyl_tick_n(pyl_store * store, _Inout_ pyl_tick * tick, void * lanes, size_t n_lanes, int32_t * tokens)'),
        projectorParamsInit: raw('void pyl_projector_params_init(_Inout_ pyl_projector_params * params, uint32_t struct_size)'),
        projectorOpen: status('pyl_projector_open(_Out_ pyl_projector ** out, const pyl_model * model, const char * path, size_t n_path, const pyl_projector_params * params)'),
        projectorFree: status('pyl_projector_free(pyl_projector * projector)'),
        promptMake: status('pyl_prompt_make(_Out_ pyl_prompt ** out, const pyl_model * model, const pyl_projector * projector, const pyl_part * parts, size_t n_parts, uint32_t flags)'),
        promptFree: status('pyl_prompt_free(pyl_prompt * prompt)'),
        quote: status('pyl_prompt_quote(const pyl_prompt * prompt, _Inout_ pyl_quote * out)'),
        decodePrompts: raw('int32_t pyl_decode_prompts_n(pyl_store * store, _Inout_ pyl_item * items, size_t n_items)'),
    };
    const layout = JSON.parse(text((out) => abi.layout(out)));
    for (const name of Object.keys(STRUCTS)) { // longer is fine: fields this program does not know of
        if (koffi.sizeof(types[name]) > layout[name].size) throw new Error(`${name} is ${koffi.sizeof(types[name])} bytes here and ${layout[name].size} in the library`);
    }

    /** Runs a call that makes a text, and frees the text. */
    function text(call) {
        const out = [null];
        call(out);
        return take(out[0]);
    }
    function handle(call) {
        const out = [null];
        call(out);
        return out[0];
    }
    const bytes = (words) => Buffer.byteLength(words);
    const storeParams = (nCtx) => {
        const params = make('pyl_store_params');
        abi.storeParamsInit(params, params.struct_size);
        return Object.assign(params, { n_ctx: nCtx });
    };

    // The calls, each in one place.
    return {
        storeParams,
        sampling(temperature) {
            const out = make('pyl_sampling');
            abi.samplingInit(out, out.struct_size);
            return Object.assign(out, { temperature, top_k: 0, top_p: 1, min_p: 0 });
        },
        openModel: (path) => handle((out) => abi.modelOpen(out, path, bytes(path), null)),
        openProjector(model, path) {
            const params = make('pyl_projector_params');
            abi.projectorParamsInit(params, params.struct_size);
            return handle((out) => abi.projectorOpen(out, model, path, bytes(path), Object.assign(params, { n_threads: 1 })));
        },
        openStore: (model, params) => handle((out) => abi.storeOpen(out, model, params)),
        freeModel: abi.modelFree,
        freeProjector: abi.projectorFree,
        freeStore: abi.storeFree,
        freePrompt: abi.promptFree,
        dryRun: (path, params) => JSON.parse(text((out) => abi.dryRun(out, path, bytes(path), null, params))),
        tokenize(model, words) {
            const tokens = new Int32Array(bytes(words) + 8), n = [0];
            abi.tokenize(model, words, bytes(words), PARSE_SPECIAL, tokens, tokens.length, n);
            return tokens.slice(0, Number(n[0]));
        },
        detokenize: (model, tokens) => text((out) => abi.detokenize(model, tokens, tokens.length, 0, out)),
        root: (store, sampling) => handle((out) => abi.create(store, out, 0, sampling, null)),
        /** A child for each seed; without seeds, one that continues exactly as the branch would. */
        fork(store, branch, seeds = null) {
            const out = new BigUint64Array(seeds ? seeds.length : 1);
            abi.fork(store, branch, out, out.length, seeds, 0);
            return Array.from(out);
        },
        setSampling: abi.setSampling,
        prune: abi.prune,
        prefill(store, branch, tokens) {
            const room = koffi.as(tokens, 'int32_t *');
            abi.prefill(store, make('pyl_run', { branch, n_tokens: tokens.length, tokens: room }), 1, 0, null);
        },
        /** Text with special tokens, then a picture; the library keeps copies. */
        picturePrompt(model, projector, before, rgb, side) {
            const parts = [
                make('pyl_part', { kind: PART_TEXT, text: before, n: bytes(before), flags: PARSE_SPECIAL }),
                make('pyl_part', { kind: PART_IMAGE, rgb: koffi.as(rgb, 'uint8_t *'), width: side, height: side }),
            ];
            return handle((out) => abi.promptMake(out, model, projector, parts, parts.length, 0));
        },
        quote(prompt) {
            const out = make('pyl_quote');
            abi.quote(prompt, out);
            return out;
        },
        decodePrompt(store, branch, prompt) {
            const item = make('pyl_item', { branch, prompt });
            const code = abi.decodePrompts(store, item, 1);
            if (item.message) abi.free(item.message);
            check(code);
        },
        /** Up to nSteps tokens of each branch, and whether it has ended. */
        tick(store, branches, nSteps) {
            const size = koffi.sizeof(types.pyl_lane), lanes = koffi.alloc(types.pyl_lane, branches.length), tokens = new Int32Array(branches.length * nSteps);
            try {
                koffi.encode(lanes, koffi.array(types.pyl_lane, branches.length), branches.map((branch) => make('pyl_lane', { branch })));
                abi.tick(store, make('pyl_tick', { n_steps: nSteps }), lanes, branches.length, tokens);
                return branches.map((_, i) => {
                    const lane = koffi.decode(lanes, i * size, types.pyl_lane);
                    return { tokens: tokens.slice(i * nSteps, i * nSteps + lane.n_tokens), ended: lane.finish === FINISH_EOG };
                });
            } finally {
                koffi.free(lanes);
            }
        },
        pressure(store) {
            const out = make('pyl_pressure');
            abi.pressure(store, out);
            return out;
        },
        liveObjects() {
            const out = make('pyl_live');
            abi.live(out);
            return Object.keys(STRUCTS.pyl_live).reduce((sum, kind) => sum + out[kind], 0);
        },
    };
}

module.exports = { load, E_CONTEXT };
