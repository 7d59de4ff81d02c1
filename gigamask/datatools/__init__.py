"""Tools that prepare data: conversion, verification and statistics."""
