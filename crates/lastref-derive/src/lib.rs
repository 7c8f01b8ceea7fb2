//! `#[derive(Trace)]` for [`lastref::gc::Trace`](https://docs.rs/lastref/latest/lastref/gc/trait.Trace.html).
//!
//! The derived implementation traces every field once, in order of declaration, which is what the
//! trait's contract asks for. So each field's type must implement `Trace`, unless the field is
//! marked:
//!
//! * `#[trace(skip)]` on a field: it holds no handle, and its type need not implement `Trace`. A
//!   handle in it is not traced, so a cycle through it is never freed. That is a leak, not a danger.
//! * `#[trace(finalize)]` on the type: it implements `lastref::gc::Finalize`, which is called once
//!   before the value dies.

use proc_macro2::TokenStream;
use quote::{format_ident, quote, quote_spanned};
use syn::spanned::Spanned;
use syn::{Data, DeriveInput, Field, Fields, parse_macro_input, parse_quote};

/// Derives `Trace`: see the [crate](self).
#[proc_macro_derive(Trace, attributes(trace))]
pub fn derive_trace(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    expand(input)
        .unwrap_or_else(syn::Error::into_compile_error)
        .into()
}

fn expand(mut input: DeriveInput) -> syn::Result<TokenStream> {
    let finalize = has_word(&input.attrs, "finalize", &["finalize"])?;
    let mut types = Vec::new();
    let body = match &input.data {
        Data::Struct(data) => {
            let (pattern, calls) = arm(&data.fields, &mut types)?;
            quote! { let Self #pattern = self; #calls }
        }
        Data::Enum(data) => {
            let mut arms = Vec::new();
            for variant in &data.variants {
                let name = &variant.ident;
                let (pattern, calls) = arm(&variant.fields, &mut types)?;
                arms.push(quote! { Self::#name #pattern => { #calls } });
            }
            // An enum without variants has no values to match by reference.
            if arms.is_empty() {
                quote! { match *self {} }
            } else {
                quote! { match self { #(#arms)* } }
            }
        }
        Data::Union(data) => {
            let text = "Trace cannot be derived for a union: which field is alive is not known";
            return Err(syn::Error::new(data.union_token.span(), text));
        }
    };
    for parameter in input.generics.type_params_mut() {
        parameter.bounds.push(parse_quote!(::lastref::gc::Trace));
    }
    let name = &input.ident;
    let (impl_generics, type_generics, where_clause) = input.generics.split_for_impl();
    let finalizer = finalize.then(|| {
        quote! {
            fn has_finalizer() -> bool {
                true
            }

            fn finalize(&self) {
                ::lastref::gc::Finalize::finalize(self);
            }
        }
    });
    Ok(quote! {
        // SAFETY: each field that can hold a handle is traced once.
        unsafe impl #impl_generics ::lastref::gc::Trace for #name #type_generics #where_clause {
            fn trace(&self, tracer: &mut ::lastref::gc::Tracer<'_>) {
                let _ = &tracer;
                #body
            }

            fn is_leaf(levels: u32) -> bool {
                // A type may contain itself, behind a box or in a vector.
                levels > 0 #(&& <#types as ::lastref::gc::Trace>::is_leaf(levels - 1))*
            }

            #finalizer
        }
    })
}

/// The pattern that binds a struct's or variant's fields, and the calls that trace them. The types
/// that are traced are added to `types`.
fn arm(fields: &Fields, types: &mut Vec<syn::Type>) -> syn::Result<(TokenStream, TokenStream)> {
    let mut names = Vec::new();
    let mut calls = Vec::new();
    for (at, field) in fields.iter().enumerate() {
        let name = format_ident!("field_{at}");
        if skipped(field)? {
            names.push(quote!(_));
            continue;
        }
        types.push(field.ty.clone());
        calls.push(
            quote_spanned! { field.ty.span() => ::lastref::gc::Trace::trace(#name, tracer); },
        );
        names.push(quote!(#name));
    }
    let pattern = match fields {
        Fields::Named(named) => {
            let idents = named.named.iter().map(|field| &field.ident);
            quote! { { #(#idents: #names),* } }
        }
        Fields::Unnamed(_) => quote! { ( #(#names),* ) },
        Fields::Unit => TokenStream::new(),
    };
    Ok((pattern, quote! { #(#calls)* }))
}

fn skipped(field: &Field) -> syn::Result<bool> {
    has_word(&field.attrs, "skip", &["skip"])
}

/// Whether an attribute `#[trace(word)]` is there. Words that are not known are refused.
fn has_word(attrs: &[syn::Attribute], word: &str, known: &[&str]) -> syn::Result<bool> {
    let mut found = false;
    for attr in attrs.iter().filter(|attr| attr.path().is_ident("trace")) {
        attr.parse_nested_meta(|meta| {
            found |= meta.path.is_ident(word);
            if known.iter().any(|known| meta.path.is_ident(known)) {
                return Ok(());
            }
            Err(meta.error(format!(
                "unknown attribute, `{}` is known here",
                known.join("`, `")
            )))
        })?;
    }
    Ok(found)
}
