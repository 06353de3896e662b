//! What of pylloyal.h this program uses, written by hand, and handles that give themselves back.
//! The sizes of all structs are held to the library's own account by `check_layout`.
#![allow(non_camel_case_types)]

use std::ffi::{c_char, c_void, CStr};
use std::fmt;
use std::ptr::{null, null_mut};

pub const ABI_VERSION: i32 = 1;
pub const E_CONTEXT: i32 = -15;
pub const PARSE_SPECIAL: u32 = 2;
pub const PART_TEXT: i32 = 0;
pub const PART_IMAGE: i32 = 2;
pub const FINISH_EOG: i32 = 1;

macro_rules! opaque { ($($name:ident),*) => { $(#[repr(C)] pub struct $name { _private: [u8; 0] })* } }
opaque!(pyl_model, pyl_store, pyl_projector, pyl_prompt, pyl_text);
pub type pyl_branch = u64;

/// Structs are declared with their names in the header, so that `check_layout` can compare them; all begin as zeros but for their size.
macro_rules! structs {
    ($($name:ident { $($field:ident: $type:ty),* $(,)? })*) => {
        $(#[repr(C)] #[derive(Clone, Copy)] pub struct $name { pub struct_size: u32, $(pub $field: $type),* }
        impl Default for $name {
            fn default() -> Self {
                // SAFETY: all fields are integers, floats and raw pointers, for which zero is a value.
                let mut out: Self = unsafe { std::mem::zeroed() };
                out.struct_size = size_of::<Self>() as u32;
                out
            }
        })*
        const SIZES: &[(&str, usize)] = &[$((stringify!($name), size_of::<$name>())),*];
    };
}
structs! {
    pyl_error { code: i32, state: i32, engine_rc: i32, partial: i32, index: i32, need: i64, have: i64, message: *const c_char }
    pyl_live { models: u32, weights: u32, stores: u32, contexts: u32, branches: u32, grammars: u32, texts: u32, embedders: u32, projectors: u32, prompts: u32 }
    pyl_model_params { n_gpu_layers: i32, use_mmap: i32, vocab_only: i32 }
    pyl_store_params { n_ctx: u32, n_batch: u32, n_branches: u32, n_threads: u32, flash_attn: i32, type_k: i32, type_v: i32, swa_full: i32, deterministic: i32, n_ubatch: u32, n_rs_seq: u32,
                       n_outputs: u32, kv_unified: i32, offload_kqv: i32, op_offload: i32 }
    pyl_pressure { n_ctx: u32, n_batch: u32, n_threads: u32, cells_used: u32, cells_remaining: u32, leases_used: u32, leases_remaining: u32, flash_attn: i32, is_draining: i32,
                   n_dispatches: u64, n_tokens_decoded: u64, n_tokens_sampled: u64, decode_s: f64, sample_s: f64, swa_full: i32, deterministic: i32, n_ubatch: u32 }
    pyl_sampling { temperature: f32, top_k: i32, top_p: f32, min_p: f32, typical_p: f32, penalty_repeat: f32, penalty_frequency: f32, penalty_presence: f32, penalty_last_n: i32, seed_mode: i32,
                   seed: u64, ignore_eog: i32 }
    pyl_run { n_tokens: u32, branch: pyl_branch, tokens: *const i32, n_landed: u32, state: i32 }
    pyl_lane { finish: i32, branch: pyl_branch, max_tokens: u32, n_tokens: u32, final_token: i32, state: i32 }
    pyl_tick { n_steps: u32, stop_tokens: *const i32, n_stop_tokens: usize, n_ticks: u32, n_dispatches: u32, out_of_cells: i32, max_run_tokens: u32 }
    pyl_projector_params { n_threads: u32, use_gpu: i32, flash_attn: i32, image_min_tokens: u32, image_max_tokens: u32, cache_bytes: u64 }
    pyl_part { kind: i32, text: *const c_char, tokens: *const i32, rgb: *const u8, samples: *const f32, n: usize, flags: u32, width: u32, height: u32, is_frame: i32, n_pos: i32,
               is_non_causal: i32, id: *const c_char }
    pyl_quote { n_segments: u32, n_cells: u32, n_pos: u32, n_media: u32, max_rows: u32, is_decodable: i32 }
    pyl_item { code: i32, branch: pyl_branch, prompt: *const pyl_prompt, message: *mut pyl_text, n_segments_landed: u32, n_cells_landed: u32, state: i32, engine_rc: i32 }
}

#[link(name = "pylloyal")]
extern "C" {
    fn pyl_abi_version() -> i32;
    fn pyl_abi_layout(out: *mut *mut pyl_text) -> i32;
    fn pyl_text_data(text: *const pyl_text) -> *const c_char;
    fn pyl_text_size(text: *const pyl_text) -> usize;
    fn pyl_text_free(text: *mut pyl_text);
    fn pyl_error_last() -> *const pyl_error;
    fn pyl_live_objects(out: *mut pyl_live) -> i32;
    fn pyl_model_open(out: *mut *mut pyl_model, path: *const c_char, n_path: usize, params: *const pyl_model_params) -> i32;
    fn pyl_model_free(model: *mut pyl_model) -> i32;
    fn pyl_tokenize(model: *const pyl_model, text: *const c_char, n_text: usize, flags: u32, tokens: *mut i32, capacity: usize, n_tokens: *mut usize) -> i32;
    fn pyl_detokenize(model: *const pyl_model, tokens: *const i32, n_tokens: usize, flags: u32, out: *mut *mut pyl_text) -> i32;
    fn pyl_store_params_init(params: *mut pyl_store_params, struct_size: u32);
    fn pyl_store_open(out: *mut *mut pyl_store, model: *const pyl_model, params: *const pyl_store_params) -> i32;
    fn pyl_store_free(store: *mut pyl_store) -> i32;
    fn pyl_store_pressure(store: *const pyl_store, out: *mut pyl_pressure) -> i32;
    fn pyl_dry_run(out: *mut *mut pyl_text, path: *const c_char, n_path: usize, model: *const pyl_model_params, store: *const pyl_store_params) -> i32;
    fn pyl_sampling_init(sampling: *mut pyl_sampling, struct_size: u32);
    fn pyl_branch_set_sampling(store: *mut pyl_store, branch: pyl_branch, sampling: *const pyl_sampling) -> i32;
    fn pyl_branch_create(store: *mut pyl_store, out: *mut pyl_branch, start_pos: i32, sampling: *const pyl_sampling, grammar: *const c_void) -> i32;
    fn pyl_branch_fork_n(store: *mut pyl_store, source: pyl_branch, out: *mut pyl_branch, n: usize, seeds: *const u64, flags: u32) -> i32;
    fn pyl_branch_prune_subtree(store: *mut pyl_store, branch: pyl_branch) -> i32;
    fn pyl_prefill_n(store: *mut pyl_store, runs: *mut pyl_run, n_runs: usize, max_dispatches: u32, n_dispatches: *mut u32) -> i32;
    fn pyl_tick_n(store: *mut pyl_store, tick: *mut pyl_tick, lanes: *mut pyl_lane, n_lanes: usize, tokens: *mut i32) -> i32;
    fn pyl_projector_params_init(params: *mut pyl_projector_params, struct_size: u32);
    fn pyl_projector_open(out: *mut *mut pyl_projector, model: *const pyl_model, path: *const c_char, n_path: usize, params: *const pyl_projector_params) -> i32;
    fn pyl_projector_free(projector: *mut pyl_projector) -> i32;
    fn pyl_prompt_make(out: *mut *mut pyl_prompt, model: *const pyl_model, projector: *const pyl_projector, parts: *const pyl_part, n_parts: usize, flags: u32) -> i32;
    fn pyl_prompt_free(prompt: *mut pyl_prompt) -> i32;
    fn pyl_prompt_quote(prompt: *const pyl_prompt, out: *mut pyl_quote) -> i32;
    fn pyl_decode_prompts_n(store: *mut pyl_store, items: *mut pyl_item, n_items: usize) -> i32;
}

/// A failure, with what became of the state and the numbers that led to it.
#[derive(Debug)]
pub struct Error {
    pub code: i32,
    pub state: i32,
    pub need: i64,
    pub have: i64,
    pub message: String,
}
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "code {}, state {}, need {}, have {}: {}", self.code, self.state, self.need, self.have, self.message)
    }
}
impl std::error::Error for Error {}
pub type Result<T> = std::result::Result<T, Error>;

fn check(code: i32) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: never NULL, and this thread's own until its next failing call; the message is NUL-terminated.
    let (e, message) = unsafe { (&*pyl_error_last(), CStr::from_ptr((*pyl_error_last()).message)) };
    Err(Error { code: e.code, state: e.state, need: e.need, have: e.have, message: message.to_string_lossy().into_owned() })
}

/// Runs a call that makes a text, and frees the text.
fn text(call: impl FnOnce(*mut *mut pyl_text) -> i32) -> Result<String> {
    let mut text = null_mut();
    check(call(&mut text))?;
    // SAFETY: the bytes live until the free below, and are copied before it.
    unsafe {
        let bytes = std::slice::from_raw_parts(pyl_text_data(text).cast::<u8>(), pyl_text_size(text));
        let copy = String::from_utf8_lossy(bytes).into_owned();
        pyl_text_free(text);
        Ok(copy)
    }
}

/// The number behind a key, of JSON that the library wrote.
pub fn number_after(json: &str, key: &str) -> Option<i64> {
    let rest = &json[json.find(key)? + key.len()..];
    rest[..rest.find(|c: char| !c.is_ascii_digit())?].parse().ok()
}

/// The ABI's number and the size of every struct declared here, against the library.
pub fn check_layout() -> Result<()> {
    let found = unsafe { pyl_abi_version() };
    assert_eq!(found, ABI_VERSION, "the library speaks another ABI");
    let told = text(|out| unsafe { pyl_abi_layout(out) })?;
    for (name, size) in SIZES {
        // Longer is fine: fields this program does not know of.
        let there = number_after(&told, &format!("\"{name}\":{{\"size\":")).unwrap_or(0);
        assert!(there >= *size as i64, "{name} is {size} bytes here and {there} in the library");
    }
    Ok(())
}

pub fn live_objects() -> Result<u32> {
    let mut n = pyl_live::default();
    check(unsafe { pyl_live_objects(&mut n) })?;
    Ok(n.models + n.weights + n.stores + n.contexts + n.branches + n.grammars + n.texts + n.embedders + n.projectors + n.prompts)
}

pub fn store_params(n_ctx: u32) -> pyl_store_params {
    let mut out = pyl_store_params::default();
    unsafe { pyl_store_params_init(&mut out, size_of::<pyl_store_params>() as u32) };
    out.n_ctx = n_ctx;
    out
}

pub fn sampling(temperature: f32) -> pyl_sampling {
    let mut out = pyl_sampling::default();
    unsafe { pyl_sampling_init(&mut out, size_of::<pyl_sampling>() as u32) };
    (out.temperature, out.top_k, out.top_p, out.min_p) = (temperature, 0, 1.0, 0.0);
    out
}

pub fn dry_run(path: &str, params: &pyl_store_params) -> Result<String> {
    text(|out| unsafe { pyl_dry_run(out, path.as_ptr().cast(), path.len(), null(), params) })
}

pub struct Model(*mut pyl_model);
impl Drop for Model {
    fn drop(&mut self) {
        unsafe { pyl_model_free(self.0) };
    }
}
impl Model {
    pub fn open(path: &str) -> Result<Model> {
        let mut handle = null_mut();
        check(unsafe { pyl_model_open(&mut handle, path.as_ptr().cast(), path.len(), null()) })?;
        Ok(Model(handle))
    }
    pub fn tokenize(&self, text: &str) -> Result<Vec<i32>> {
        let mut tokens = vec![0; text.len() + 8];
        let mut n = 0;
        check(unsafe { pyl_tokenize(self.0, text.as_ptr().cast(), text.len(), PARSE_SPECIAL, tokens.as_mut_ptr(), tokens.len(), &mut n) })?;
        tokens.truncate(n);
        Ok(tokens)
    }
    pub fn detokenize(&self, tokens: &[i32]) -> Result<String> {
        text(|out| unsafe { pyl_detokenize(self.0, tokens.as_ptr(), tokens.len(), 0, out) })
    }
}

pub struct Projector(*mut pyl_projector);
impl Drop for Projector {
    fn drop(&mut self) {
        unsafe { pyl_projector_free(self.0) };
    }
}
impl Projector {
    pub fn open(model: &Model, path: &str) -> Result<Projector> {
        let (mut handle, mut params) = (null_mut(), pyl_projector_params::default());
        unsafe { pyl_projector_params_init(&mut params, size_of::<pyl_projector_params>() as u32) };
        params.n_threads = 1;
        check(unsafe { pyl_projector_open(&mut handle, model.0, path.as_ptr().cast(), path.len(), &params) })?;
        Ok(Projector(handle))
    }
}

pub struct Prompt(*mut pyl_prompt);
impl Drop for Prompt {
    fn drop(&mut self) {
        unsafe { pyl_prompt_free(self.0) };
    }
}
impl Prompt {
    /// Text (with special tokens), then a picture; the library keeps copies.
    pub fn make(model: &Model, projector: &Projector, before: &str, rgb: &[u8], side: u32) -> Result<Prompt> {
        assert_eq!(rgb.len(), (side * side * 3) as usize);
        let parts = [
            pyl_part { kind: PART_TEXT, text: before.as_ptr().cast(), n: before.len(), flags: PARSE_SPECIAL, ..Default::default() },
            pyl_part { kind: PART_IMAGE, rgb: rgb.as_ptr(), width: side, height: side, ..Default::default() },
        ];
        let mut handle = null_mut();
        check(unsafe { pyl_prompt_make(&mut handle, model.0, projector.0, parts.as_ptr(), parts.len(), 0) })?;
        Ok(Prompt(handle))
    }
    pub fn quote(&self) -> Result<pyl_quote> {
        let mut out = pyl_quote::default();
        check(unsafe { pyl_prompt_quote(self.0, &mut out) })?;
        Ok(out)
    }
}

pub struct Store(*mut pyl_store);
impl Drop for Store {
    fn drop(&mut self) {
        unsafe { pyl_store_free(self.0) };
    }
}
impl Store {
    pub fn open(model: &Model, params: &pyl_store_params) -> Result<Store> {
        let mut handle = null_mut();
        check(unsafe { pyl_store_open(&mut handle, model.0, params) })?;
        Ok(Store(handle))
    }
    pub fn root(&self, sampling: &pyl_sampling) -> Result<Branch<'_>> {
        let mut id = 0;
        check(unsafe { pyl_branch_create(self.0, &mut id, 0, sampling, null()) })?;
        Ok(Branch { store: self, id })
    }
    pub fn pressure(&self) -> Result<pyl_pressure> {
        let mut out = pyl_pressure::default();
        check(unsafe { pyl_store_pressure(self.0, &mut out) })?;
        Ok(out)
    }
    /// Up to `n_steps` tokens of each branch, and whether it has ended.
    pub fn tick(&self, branches: &[Branch<'_>], n_steps: usize) -> Result<Vec<(Vec<i32>, bool)>> {
        let mut tokens = vec![0; branches.len() * n_steps];
        let mut lanes: Vec<_> = branches.iter().map(|b| pyl_lane { branch: b.id, ..Default::default() }).collect();
        let mut tick = pyl_tick { n_steps: n_steps as u32, ..Default::default() };
        check(unsafe { pyl_tick_n(self.0, &mut tick, lanes.as_mut_ptr(), lanes.len(), tokens.as_mut_ptr()) })?;
        Ok(lanes.iter().zip(tokens.chunks(n_steps)).map(|(lane, row)| (row[..lane.n_tokens as usize].to_vec(), lane.finish == FINISH_EOG)).collect())
    }
}

/// Prunes itself, with everything below it.
pub struct Branch<'a> {
    store: &'a Store,
    id: pyl_branch,
}
impl Drop for Branch<'_> {
    fn drop(&mut self) {
        unsafe { pyl_branch_prune_subtree(self.store.0, self.id) };
    }
}
impl<'a> Branch<'a> {
    /// A child for each seed; `None`: one that continues exactly as this branch would.
    pub fn fork(&self, seeds: Option<&[u64]>) -> Result<Vec<Branch<'a>>> {
        let mut ids = vec![0; seeds.map_or(1, <[u64]>::len)];
        check(unsafe { pyl_branch_fork_n(self.store.0, self.id, ids.as_mut_ptr(), ids.len(), seeds.map_or(null(), <[u64]>::as_ptr), 0) })?;
        Ok(ids.into_iter().map(|id| Branch { store: self.store, id }).collect())
    }
    pub fn set_sampling(&self, sampling: &pyl_sampling) -> Result<()> {
        check(unsafe { pyl_branch_set_sampling(self.store.0, self.id, sampling) })
    }
    pub fn prefill(&self, tokens: &[i32]) -> Result<()> {
        let mut run = pyl_run { branch: self.id, tokens: tokens.as_ptr(), n_tokens: tokens.len() as u32, ..Default::default() };
        check(unsafe { pyl_prefill_n(self.store.0, &mut run, 1, 0, null_mut()) })
    }
    pub fn prefill_prompt(&self, prompt: &Prompt) -> Result<()> {
        let mut item = pyl_item { branch: self.id, prompt: prompt.0, ..Default::default() };
        let code = unsafe { pyl_decode_prompts_n(self.store.0, &mut item, 1) };
        unsafe { pyl_text_free(item.message) };
        check(code)
    }
}
